"""The bodies of the scripts, by name, behind the prelude of ``scripts.py``, where the data model is.

The first argument is the length of a key; the others are named at the head of each script. Several keys are one string.
Scripts that take a member return false if its lease has ended; those that answer for each key return bytes: 0, or the
``Reason`` why nothing was done.
"""

from vllm_omni.kv.pool.directory.records import PAGE_BYTES

OPERATIONS = {
    "join": """
local node, lease_ms = ARGV[2], tonumber(ARGV[3])
call('SET', prefix .. '#', string.format('%.0f', now * 1000), 'NX')
local old, epoch = call('HGET', prefix .. 'm', node), next_number()
if old then
  retire(old)
end
call('HSET', prefix .. 'n', epoch, pack('>I8', now + lease_ms) .. node)
call('HSET', prefix .. 'm', node, epoch)
return epoch
""",
    "renew": """
local epoch, lease_ms = ARGV[2], tonumber(ARGV[3])
local node = live(epoch)
if not node then
  return false
end
call('HSET', prefix .. 'n', epoch, pack('>I8', now + lease_ms) .. node)
return 1
""",
    "leave": """
local epoch, node = ARGV[2], ARGV[3]
if call('HEXISTS', prefix .. 'n', epoch) == 1 then
  retire(epoch)
  call('HDEL', prefix .. 'm', node)
end
return 1
""",
    "sweep": """
local limit = tonumber(ARGV[2])
local leases = call('HGETALL', prefix .. 'n')
for i = 1, #leases, 2 do
  if number(leases[i + 1]) <= now then
    retire(leases[i])
    call('HDEL', prefix .. 'm', leases[i + 1]:sub(9))
  end
end
local removed = 0
for _, epoch in ipairs(call('SMEMBERS', prefix .. 'd')) do
  local keys = call('SPOP', prefix .. 'h' .. epoch, limit - removed)
  local pages = read('p', keys)
  for key, replicas in pairs(pages) do
    pages[key] = without(replicas, epoch)
  end
  write('p', pages)
  removed = removed + #keys
  if call('EXISTS', prefix .. 'h' .. epoch) == 0 then
    call('SREM', prefix .. 'd', epoch)
    call('DEL', prefix .. 'c' .. epoch)
  end
  if removed == limit then
    break
  end
end
local marks = call('HGETALL', prefix .. 'w')
for i = 1, #marks, 2 do
  if not writer(marks[i + 1]) then
    call('HDEL', prefix .. 'w', marks[i])
  end
end
return removed
""",
    "begin_write": """
local self, keys, write_ms = ARGV[2], cut(ARGV[3], size), tonumber(ARGV[4])
if not live(self) then
  return false
end
local pages, claims, marks = read('p', keys), read('c' .. self, keys), read('w', keys)
local reasons, changed, mine, removed = {}, {}, {}, {}
for i, key in ipairs(keys) do
  local other = writer(marks[key])
  if other and other ~= self then
    reasons[i] = 2
  elseif in_use(claims[key]) then
    reasons[i] = 1
  else
    reasons[i] = 0
    mine[key] = pack('>I8', now + write_ms) .. self
    if find(pages[key], self) then
      changed[key], removed[#removed + 1] = without(pages[key], self), key
    end
  end
end
write('w', mine)
write('p', changed)
if #removed > 0 then
  call('SREM', prefix .. 'h' .. self, unpack(removed))
  call('HDEL', prefix .. 'c' .. self, unpack(removed))
end
return string.char(unpack(reasons))
""",
    "abandon": """
local self, keys = ARGV[2], cut(ARGV[3], size)
local ended = {}
for key, mark in pairs(read('w', keys)) do
  if mark:sub(9) == self then
    ended[key] = ''
  end
end
write('w', ended)
return 1
""",
    "publish": f"""
local self, keys, values = ARGV[2], cut(ARGV[3], size), cut(ARGV[4], {PAGE_BYTES})
local node = live(self)
if not node then
  return false
end
local pages, claims, marks = read('p', keys), read('c' .. self, keys), read('w', keys)
local version, reasons, changed, ended, new = next_number(), {{}}, {{}}, {{}}, {{}}
for i, key in ipairs(keys) do
  local replicas = pages[key]
  local at = find(replicas, self)
  local is_same = at and replicas:sub(at + 16, at + REPLICA - 1) == values[i]
  if at and not is_same and in_use(claims[key]) then
    reasons[i] = 1
  else
    reasons[i] = 0
    if not is_same then
      pages[key] = without(replicas, self) .. self .. version .. values[i]
      changed[key], new[#new + 1] = pages[key], key
    end
    if marks[key]:sub(9) == self then
      ended[key] = ''
    end
  end
end
if #new > 0 then
  call('SADD', prefix .. 'h' .. self, unpack(new)) -- first: without memory the script ends here, and nothing is lost
end
write('p', changed)
write('w', ended)
notify(node, '', table.concat(new))
return string.char(unpack(reasons))
""",
    # Answers with the number of the claim; then for each page the number of replicas (1 byte), and for each of those
    # the length of its node (1 byte), the node, and the record.
    "match": """
local self, keys, claim_ms, full = ARGV[2], cut(ARGV[3], size), tonumber(ARGV[4]), bit.tobit(tonumber(ARGV[5]))
if not live(self) then
  return false
end
local pages, prefix_keys, parts, bits = read('p', keys), {}, {}, {}
local function count(mask)
  if not bits[mask] then
    local rest, ones = mask, 0
    while rest > 0 do
      ones, rest = ones + rest % 2, math.floor(rest / 2)
    end
    bits[mask] = ones
  end
  return bits[mask]
end
local masks = {} -- of each page: epoch -> mask, and places
for i, key in ipairs(keys) do
  local replicas, cover, holders = pages[key], 0, {}
  for at = 1, #replicas, REPLICA do
    local epoch = replicas:sub(at, at + 7)
    if live(epoch) then
      local mask = struct.unpack('>I4', replicas, at + 16)
      cover = bit.bor(cover, mask)
      holders[epoch] = {mask, at}
    end
  end
  if cover ~= full then
    break
  end
  for epoch, holder in pairs(holders) do
    parts[epoch] = (parts[epoch] or 0) + count(holder[1])
  end
  masks[i] = holders
end
if #masks == 0 then
  return ''
end
local order = {}
for epoch in pairs(parts) do
  order[#order + 1] = epoch
end
table.sort(order, function(a, b)
  if (a == self) ~= (b == self) then
    return a == self
  elseif parts[a] ~= parts[b] then
    return parts[a] > parts[b]
  end
  return live(a) < live(b)
end)
local claim = next_number()
local entry, answer, claimed = self .. claim .. pack('>I8', now + claim_ms), {claim}, {}
for i, holders in ipairs(masks) do
  local cover, picked, place = 0, 0, #answer + 1
  for _, epoch in ipairs(order) do
    local holder = holders[epoch]
    local more = holder and bit.bor(cover, holder[1])
    if more and more ~= cover then
      local node = live(epoch)
      cover, picked = more, picked + 1
      answer[place + picked] = string.char(#node) .. node .. pages[keys[i]]:sub(holder[2], holder[2] + REPLICA - 1)
      claimed[epoch] = claimed[epoch] or {}
      table.insert(claimed[epoch], keys[i])
      if cover == full then
        break
      end
    end
  end
  answer[place] = string.char(picked)
end
for epoch, its_keys in pairs(claimed) do
  local claims = read('c' .. epoch, its_keys)
  for key, old in pairs(claims) do
    local kept = ''
    for at = 1, #old, CLAIM do -- those that have not expired
      kept = kept .. (number(old, at + 16) > now and old:sub(at, at + CLAIM - 1) or '')
    end
    claims[key] = kept .. entry
  end
  write('c' .. epoch, claims)
end
return table.concat(answer)
""",
    # Entries are epoch of the holder, version, key; the answer is "1" for each that stands.
    "verify": """
local entries, keys, stands = cut(ARGV[2], 16 + size), {}, {}
for i, entry in ipairs(entries) do
  keys[i] = entry:sub(17)
end
local pages = read('p', keys)
for i, entry in ipairs(entries) do
  local epoch = entry:sub(1, 8)
  local at = live(epoch) and find(pages[keys[i]], epoch)
  stands[i] = at and pages[keys[i]]:sub(at, at + 15) == entry:sub(1, 16) and '1' or '0'
end
return table.concat(stands)
""",
    # Entries are epoch of the holder, key.
    "release": """
local claim, claimed = ARGV[2], {}
for _, entry in ipairs(cut(ARGV[3], 8 + size)) do
  local epoch = entry:sub(1, 8)
  claimed[epoch] = claimed[epoch] or {}
  table.insert(claimed[epoch], entry:sub(9))
end
for epoch, keys in pairs(claimed) do
  local changed = {}
  for key, claims in pairs(read('c' .. epoch, keys)) do
    for at = 1, #claims, CLAIM do
      if claims:sub(at, at + 15) == claim then
        changed[key] = claims:sub(1, at - 1) .. claims:sub(at + CLAIM)
      end
    end
  end
  write('c' .. epoch, changed)
end
return 1
""",
    "evict": """
local self, keys, discard = ARGV[2], cut(ARGV[3], size), ARGV[4] == '1'
if not live(self) then
  return false
end
local pages, claims, marks = read('p', keys), read('c' .. self, keys), read('w', keys)
local reasons, changed, removed = {}, {}, {}
for i, key in ipairs(keys) do
  local replicas = pages[key]
  local at = find(replicas, self)
  if in_use(claims[key]) then
    reasons[i] = 1
  elseif writer(marks[key]) then
    reasons[i] = 2
  elseif not at then
    reasons[i] = 4
  elseif not discard and replicas:byte(at + 21) == 0
      and not is_covered(replicas, struct.unpack('>I4', replicas, at + 16), self) then
    reasons[i] = 3
  else
    reasons[i] = 0
    pages[key] = without(replicas, self)
    changed[key], removed[#removed + 1] = pages[key], key
  end
end
write('p', changed)
if #removed > 0 then
  call('SREM', prefix .. 'h' .. self, unpack(removed))
  call('HDEL', prefix .. 'c' .. self, unpack(removed))
end
return string.char(unpack(reasons))
""",
    "append_chain": """
local session, keys, keep_ms, at, limit = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local name, header = prefix .. 's' .. session, pack('>I8I8', now + keep_ms, keep_ms)
local old, length = call('GETRANGE', name, 0, 7), 0
if #old == 8 and number(old) > now then
  length = (call('STRLEN', name) - 16) / size
end
if at < 0 then
  at = length
elseif at > length then
  return length
end
local new = keys:sub(1, (limit - at) * size)
if at > 0 and at == length then
  call('SETRANGE', name, 0, header)
  call('APPEND', name, new)
else
  local kept = at > 0 and call('GETRANGE', name, 16, 15 + at * size) or ''
  call('SET', name, header .. kept .. new)
end
call('PEXPIRE', name, keep_ms + 3600000) -- garbage, an hour after the deadline
notify('', session, new)
return at + #new / size
""",
    # Answers with up to ``limit`` keys from number ``first`` on whose pages are still there.
    "chain": """
local session, first, limit, full = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local name = prefix .. 's' .. session
local header = call('GETRANGE', name, 0, 15)
if #header < 16 or number(header) <= now then
  return ''
end
local keep_ms = number(header, 9)
call('SETRANGE', name, 0, pack('>I8', now + keep_ms))
call('PEXPIRE', name, keep_ms + 3600000)
local found = call('GETRANGE', name, 16 + first * size, 15 + (first + limit) * size)
local keys = cut(found, size)
local pages = read('p', keys)
for i, key in ipairs(keys) do
  if not is_covered(pages[key], full) then
    call('SET', name, call('GETRANGE', name, 0, 15 + (first + i - 1) * size), 'KEEPTTL')
    return found:sub(1, (i - 1) * size)
  end
end
return found
""",
    # The epochs of all members whose lease runs, and the time.
    "members": """
local epochs = {}
for _, epoch in ipairs(call('HKEYS', prefix .. 'n')) do
  if live(epoch) then
    epochs[#epochs + 1] = epoch
  end
end
return {epochs, now}
""",
    # Of pages: complaints, in words.
    "check_pages": """
local keys, wrong = cut(ARGV[2], size), {}
if call('HLEN', prefix .. 'n') ~= call('HLEN', prefix .. 'm') then
  wrong[1] = 'there are not as many nodes as members'
end
for key, replicas in pairs(read('p', keys)) do
  for at = 1, #replicas, REPLICA do
    local epoch = replicas:sub(at, at + 7)
    if call('SISMEMBER', prefix .. 'h' .. epoch, key) == 0 then
      wrong[#wrong + 1] = 'a replica is not in the list of its holder: ' .. key
    end
    if call('HEXISTS', prefix .. 'n', epoch) + call('SISMEMBER', prefix .. 'd', epoch) == 0 then
      wrong[#wrong + 1] = 'a replica of a member that is unknown: ' .. key
    end
  end
end
return wrong
""",
    # Of a member and pages in its list, or with claims.
    "check_member": """
local epoch, keys, wrong = ARGV[2], cut(ARGV[3], size), {}
local pages, claims = read('p', keys), read('c' .. epoch, keys)
for key, replicas in pairs(pages) do
  local is_listed = call('SISMEMBER', prefix .. 'h' .. epoch, key) == 1
  if is_listed ~= (find(replicas, epoch) ~= nil) then
    wrong[#wrong + 1] = 'a member lists a page that it does not hold, or the reverse: ' .. key
  end
  if live(epoch) and in_use(claims[key]) and not is_listed then
    wrong[#wrong + 1] = 'a replica was removed in spite of its claims: ' .. key
  end
end
local lease = call('HGET', prefix .. 'n', epoch)
if lease and call('HGET', prefix .. 'm', lease:sub(9)) ~= epoch then
  wrong[#wrong + 1] = 'a node has another member'
end
return wrong
""",
}
