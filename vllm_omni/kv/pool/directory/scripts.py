"""The operations of the directory as Lua scripts, each of which Redis runs as one atomic step.

Keys, behind a prefix ``{<layout>}:`` whose hash tag keeps those of a layout on one shard of a cluster. Epochs,
versions, numbers and deadlines (in milliseconds) are 8 bytes each, big-endian.

    n             hash: epoch -> deadline, node. The members
    m             hash: node -> epoch of its member
    d             set: epochs of former members whose replicas are not removed yet
    p             hash: key of a page -> its replicas, one behind the other (``records.py``)
    h<epoch>      set: keys of the pages that a member holds
    c<epoch>      hash: key of a page -> claims on the member's replica: epoch of the reader, number, deadline
    w             hash: key of a page -> deadline, epoch of the member that writes it
    s<session>    deadline, time to live, keys of the chain
    #             the last number given to an epoch, a version or a claim
    e             number of events so far; and the channel on which they are published

Numbers start at the time in microseconds, so that those from before a loss of all data are never given again. Expiry is
decided by deadlines against Redis' own clock.

A call into Redis from Lua costs about as much as all else that is done for a page. Hence hashes with a field for each
page, of which one call reads or writes many, instead of keys; and no sets within them.
"""

import hashlib
from typing import NamedTuple

from vllm_omni.kv.pool.directory.operations import OPERATIONS
from vllm_omni.kv.pool.directory.records import CLAIM_BYTES, REPLICA_BYTES

REDIS_CLOCK = "local time = redis.call('TIME'); local now = time[1] * 1000 + math.floor(time[2] / 1000)"


class Script(NamedTuple):
    """A script, and the name by which Redis knows it."""

    text: str
    sha: str


_PRELUDE = f"""
local prefix, call, pack, size = KEYS[1], redis.call, struct.pack, tonumber(ARGV[1])
local REPLICA, CLAIM = {REPLICA_BYTES}, {CLAIM_BYTES}
local nodes = {{}}

local function number(bytes, at)
  return struct.unpack('>I8', bytes, at or 1)
end

-- The node of a live member, or false.
local function live(epoch)
  local node = nodes[epoch]
  if node == nil then
    local lease = call('HGET', prefix .. 'n', epoch)
    node = lease and number(lease) > now and lease:sub(9)
    nodes[epoch] = node
  end
  return node
end

local function next_number()
  return pack('>I8', call('INCR', prefix .. '#'))
end

local function cut(bytes, length)
  local all = {{}}
  for first = 1, #bytes, length do
    all[#all + 1] = bytes:sub(first, first + length - 1)
  end
  return all
end

-- Fields of a hash by their names, '' for those that are missing. A key that comes twice in a call is thus read once,
-- changed in the table, and written once.
local function read(name, fields)
  local found, values = {{}}, #fields > 0 and call('HMGET', prefix .. name, unpack(fields)) or {{}}
  for i, field in ipairs(fields) do
    found[field] = values[i] or ''
  end
  return found
end

local function write(name, values)
  local full, empty = {{}}, {{}}
  for field, value in pairs(values) do
    if value == '' then
      empty[#empty + 1] = field
    else
      full[#full + 1] = field
      full[#full + 1] = value
    end
  end
  if #full > 0 then
    call('HSET', prefix .. name, unpack(full))
  end
  if #empty > 0 then
    call('HDEL', prefix .. name, unpack(empty))
  end
end

local function retire(epoch)
  call('HDEL', prefix .. 'n', epoch)
  if call('EXISTS', prefix .. 'h' .. epoch) == 1 then
    call('SADD', prefix .. 'd', epoch)
  end
end

-- Where a member's replica stands among those of a page.
local function find(replicas, epoch)
  for at = 1, #replicas, REPLICA do
    if replicas:sub(at, at + 7) == epoch then
      return at
    end
  end
end

local function without(replicas, epoch)
  local at = find(replicas, epoch)
  return at and replicas:sub(1, at - 1) .. replicas:sub(at + REPLICA) or replicas
end

local function in_use(claims)
  for at = 1, #claims, CLAIM do
    if number(claims, at + 16) > now and live(claims:sub(at, at + 7)) then
      return true
    end
  end
  return false
end

-- The epoch of the live member that writes a page.
local function writer(mark)
  if mark ~= '' and number(mark) > now and live(mark:sub(9)) then
    return mark:sub(9)
  end
end

-- Whether live members other than one hold all parts of a mask.
local function is_covered(replicas, mask, except)
  local missing = bit.tobit(mask)
  for at = 1, #replicas, REPLICA do
    local epoch = replicas:sub(at, at + 7)
    if epoch ~= except and live(epoch) then
      missing = bit.band(missing, bit.bnot(struct.unpack('>I4', replicas, at + 16)))
    end
  end
  return missing == 0
end

local function notify(node, session, keys)
  if #keys > 0 then
    local event = pack('>I8', call('INCR', prefix .. 'e'))
    call('PUBLISH', prefix .. 'e', event .. string.char(#node) .. node .. string.char(#session) .. session .. keys)
  end
end
"""


def make_scripts(clock: str = REDIS_CLOCK) -> dict[str, Script]:
    """Return all scripts by name.

    Args:
        clock: Lua that sets ``now`` in milliseconds; tests set it by hand.
    """
    texts = {name: f"{clock}\n{_PRELUDE}\n{body}" for name, body in OPERATIONS.items()}
    return {name: Script(text, hashlib.sha1(text.encode()).hexdigest()) for name, text in texts.items()}
