"""``CodePredictor``: the residual codes of a frame, from the talker's hidden state and the frame's first code.

For each frame a small transformer reads [hidden, E(c0)] and then one code after another; group g has an embedding and
a head of its own. It starts anew with each frame, so the sequence has at most ``num_code_groups`` positions: keys and
values stand in a buffer of that length, and attention reads all of it under a mask. A pass thus has the same shapes at
every position, and is compiled once for all of them (``compile_pass``).

From: Qwen3-Omni (arXiv:2509.17765), section 2.5, multi-token prediction; the same module serves Qwen3-TTS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_omni.errors import ConfigError
from vllm_omni.speech.few_rows import FewRowsLinear, JoinedLinears, prepare
from vllm_omni.speech.frame_graphs import FrameGraphs
from vllm_omni.speech.residual_sampling import SamplingBatch
from vllm_omni.speech.window_transformer import GatedMlp


@dataclass(frozen=True)
class PredictorConfig:
    """Fields have the names of the checkpoints' ``code_predictor_config``."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_code_groups: int  # also the positions of a sequence
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    attention_bias: bool = False  # of queries, keys and values
    is_qwen2: bool = False  # else Qwen3: a norm on each head's queries and keys, and the bias of outputs, too
    is_causal: bool = True

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> PredictorConfig:
        """Read a section of a checkpoint's config.json; fields of other parts are ignored.

        Raises:
            ConfigError: a field is missing.
        """
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in section.items() if name in known and value is not None}
        rope = section.get("rope_parameters") or {}
        values |= {"rope_theta": theta} if (theta := rope.get("rope_theta")) else {}
        try:
            return cls(**values)
        except TypeError as exc:
            raise ConfigError(f"the code predictor's configuration is incomplete: {exc}") from exc


class CodePredictor(nn.Module):
    """Predicts frames of a batch of requests at once. Names of parameters are the checkpoints'.

    Args:
        talker_size: width of the talker, which the embeddings have, too; where it differs from the predictor's, inputs
            pass ``small_to_mtp_projection``.
    """

    def __init__(self, config: PredictorConfig, talker_size: int) -> None:
        super().__init__()
        self.config = config
        num_residual = config.num_code_groups - 1
        tables = (nn.Embedding(config.vocab_size, talker_size) for _ in range(num_residual))
        self.model = FrameTransformer(config, tables)
        self.lm_head = nn.ModuleList(
            FewRowsLinear(config.hidden_size, config.vocab_size, bias=False) for _ in range(num_residual)
        )
        is_narrower = talker_size != config.hidden_size
        self.small_to_mtp_projection = FewRowsLinear(talker_size, config.hidden_size) if is_narrower else nn.Identity()
        self._frames = FrameGraphs(self._predict, num_residual, config.vocab_size)

    def forward(self, hidden: Tensor, first_embedding: Tensor, sampling: SamplingBatch) -> Tensor:
        """Predict one frame of each request: its residual codes, [B, num_code_groups - 1] int64.

        Args:
            hidden: [B, talker_size], after the talker's last norm.
            first_embedding: [B, talker_size], the talker's embedding of the first code.
        """
        return self._frames((hidden, first_embedding), sampling)

    def _predict(self, inputs: Sequence[Tensor], sampling: SamplingBatch, noise: Tensor | None) -> Tensor:
        hidden, first_embedding = inputs
        num_residual = self.config.num_code_groups - 1
        cache = self.model.new_cache(hidden)
        # One position at a time, as all others are, and not the first two at once: that is what is compiled.
        self.model.advance(self.small_to_mtp_projection(hidden)[:, None], cache, position=0)
        x = self.small_to_mtp_projection(first_embedding)[:, None]
        codes: list[Tensor] = []
        for group, (head, table) in enumerate(zip(self.lm_head, self.model.codec_embedding, strict=True)):
            y = self.model.advance(x, cache, position=group + 1)
            codes.append(sampling.sample(head(y[:, -1]), None if noise is None else noise[group]))
            if group + 1 < num_residual:
                # Not table(codes), whose kernel on CUDA reads row after row.
                x = self.small_to_mtp_projection(table.weight[codes[-1]])[:, None]
        return torch.stack(codes, dim=1)

    def compile_frames(self, max_rows: int) -> None:
        """Compile the passes of a frame; on CUDA, capture the frames of up to ``max_rows`` requests."""
        self.model.compile_pass()
        prepare(*self.lm_head, self.small_to_mtp_projection)
        weight = self.model.codec_embedding[0].weight
        row = weight.new_zeros(1, weight.shape[1])
        self._frames.prepare((row, row), max_rows)

    def embed(self, codes: Tensor) -> Tensor:
        """Sum of the residual codes' embeddings: [B, num_code_groups - 1] -> [B, talker_size]."""
        tables = enumerate(self.model.codec_embedding)
        return torch.stack([table(codes[:, group]) for group, table in tables]).sum(0)


class Places(NamedTuple):
    """Where rows of a pass stand."""

    positions: Tensor  # [n] int64
    all_positions: Tensor  # [num_code_groups] int64
    cos: Tensor  # [n, head_dim]
    sin: Tensor  # the same
    mask: Tensor  # [n, num_code_groups] bool: which positions a row attends to
    tables: tuple[Tensor, Tensor, Tensor]  # cos and sin, float32, and mask of all positions


class FrameTransformer(nn.Module):
    """Layers and a norm, for sequences that start anew with each frame; names of parameters are transformers'.

    Args:
        tables: embeddings of codes, where the checkpoint has them here.
    """

    def __init__(self, config: PredictorConfig, tables: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.config = config
        self.codec_embedding = nn.ModuleList(tables)
        self.layers = nn.ModuleList(PredictorLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        dim, length = config.head_dim, config.num_code_groups
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = torch.arange(length).float()[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)  # [num_code_groups, head_dim]
        mask = torch.ones(length, length, dtype=torch.bool)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("mask", mask.tril() if config.is_causal else mask, persistent=False)
        self.register_buffer("positions", torch.arange(length), persistent=False)
        self._compiled: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None  # of one row
        self._compiled_batch: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        self._has_batch = False  # whether that has been compiled

    def new_cache(self, like: Tensor) -> Tensor:
        """Keys and values of a batch: [B, num_layers, 2, num_kv_heads, num_code_groups, head_dim]."""
        config = self.config
        shape = (len(like), config.num_hidden_layers, 2, config.num_key_value_heads)
        return like.new_zeros(*shape, config.num_code_groups, config.head_dim)

    def compile_pass(self) -> None:
        """Compile a pass of one position, when it is first made: for one row, and for any more.

        A pass is bound by what its many small operations cost beside their arithmetic.
        """
        for layer in self.layers:
            assert isinstance(layer, PredictorLayer)
            layer.join_weights()
        # Without guards, which would cost as much as a small pass: only one kind of shapes comes to each, and the model
        # does not change. Compilations of each model are counted alone, however many a process has. Loops take one
        # thread: they are short, and to start another one takes longer.
        self._compiled, self._compiled_batch = (
            torch.compile(
                self._advance,
                fullgraph=True,
                dynamic=dynamic,
                isolate_recompiles=True,
                options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "cpp.threads": 1},
            )
            for dynamic in (False, None)
        )

    def advance(self, x: Tensor, cache: Tensor, position: int) -> Tensor:
        """Rows of the next positions, [B, n, hidden_size] -> the same; their keys and values are put into the cache.

        Without ``is_causal`` all positions must come at once.
        """
        num_rows, num_new, _ = x.shape
        assert self.config.is_causal or num_new == self.config.num_code_groups, "rows would attend to empty positions"
        run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = self._advance
        if num_new == 1 and self._compiled is not None and self._compiled_batch is not None:
            run = self._compiled if num_rows == 1 else self._compiled_batch
            if num_rows > 1 and not self._has_batch:
                self._has_batch = True
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.mark_dynamic(cache, 0)
        new = slice(position, position + num_new)
        y, cache[..., new, :] = run(x, cache, self.positions[new])
        return y

    def _advance(self, x: Tensor, cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Also returns keys and values, [B, num_layers, 2, num_kv_heads, n, head_dim]. The cache is not written here: a
        compiler would copy all of it for each layer.
        """
        cos, sin = self.cos[positions].to(x.dtype), self.sin[positions].to(x.dtype)
        tables, made = (self.cos, self.sin, self.mask), []
        places = Places(positions, self.positions, cos, sin, self.mask[positions], tables)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, PredictorLayer)
            x, new = layer.advance(x, cache[:, index], places)
            made.append(new)
        return self.norm(x), torch.stack(made, dim=1)


class PredictorLayer(nn.Module):
    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.self_attn = PredictorAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.mlp = GatedMlp(size, config.intermediate_size)

    def join_weights(self) -> None:
        self.self_attn.join_weights()
        self.mlp.join_weights()

    def advance(self, x: Tensor, kept: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        y, new = self.self_attn.advance(self.input_layernorm(x), kept, places)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), new


class PredictorAttention(nn.Module):
    """Attention of new rows to the positions that the mask gives them."""

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        size, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(size, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * self.head_dim, bias=bias)
        has_norms = not config.is_qwen2
        self.o_proj = FewRowsLinear(config.num_attention_heads * self.head_dim, size, bias=bias and has_norms)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if has_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if has_norms else nn.Identity()
        self._joined: JoinedLinears | None = None
        self._attend: Callable[..., tuple[Tensor, Tensor]] | None = None  # frame_kernels.attend, on CUDA

    def join_weights(self) -> None:
        self._joined = JoinedLinears(self.q_proj, self.k_proj, self.v_proj)
        self.o_proj.prepare()
        if self.o_proj.weight.is_cuda and self.head_dim.bit_count() == 1:  # Triton's blocks are powers of two
            from vllm_omni.speech.frame_kernels import attend  # Triton, which torch has for CUDA alone

            self._attend = attend

    def advance(self, x: Tensor, kept: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Attend from new rows to those in ``kept``, [B, 2, num_kv_heads, num_code_groups, head_dim], and to new ones.

        Returns:
            [B, n, hidden_size]; their keys and values, as in ``kept``.
        """
        num_rows, num_new, _ = x.shape
        if num_new == 1 and self._joined is not None and self._attend is not None:
            norms = None if isinstance(self.q_norm, nn.Identity) else (self.q_norm, self.k_norm)
            y, new = self._attend(self._joined.product(x)[:, 0], kept, norms, places.positions, *places.tables)
            return self.o_proj(y[:, None]), new
        made = (self.q_proj(x), self.k_proj(x), self.v_proj(x)) if self._joined is None else self._joined(x)
        query, key, value = (one.view(num_rows, num_new, -1, self.head_dim).transpose(1, 2) for one in made)
        query, key = (rotate(y, places.cos, places.sin) for y in (self.q_norm(query), self.k_norm(key)))
        new = torch.stack((key, value), dim=1)
        attend = attend_in_loops if num_new == 1 and torch.compiler.is_compiling() else attend_by_kernel
        y = attend(query, kept, new, places).transpose(1, 2).reshape(num_rows, num_new, -1)
        return self.o_proj(y), new


def attend_by_kernel(query: Tensor, kept: Tensor, new: Tensor, places: Places) -> Tensor:
    """[B, heads, n, head_dim] -> the same."""
    keys, values = kept.index_copy(3, places.positions, new).unbind(1)
    has_groups = query.shape[1] != keys.shape[1]
    return functional.scaled_dot_product_attention(query, keys, values, places.mask, enable_gqa=has_groups)


def attend_in_loops(query: Tensor, kept: Tensor, new: Tensor, places: Places) -> Tensor:
    """The same from one row, in sums, which a compiler makes loops of, beside those around it: there is little to
    compute, and calling a kernel takes longer.
    """
    both = torch.where((places.all_positions == places.positions)[:, None], new, kept)
    keys, values = both[:, 0, :, None], both[:, 1, :, None]  # with unbind() torch compiles for one size of batch alone
    grouped = query.unflatten(1, (keys.shape[1], -1)) * query.shape[-1] ** -0.5  # [B, kv_heads, heads of each, 1, dim]
    scores = (grouped * keys).sum(-1).masked_fill(~places.mask, float("-inf"))
    return (scores.softmax(-1)[..., None] * values).sum(-2, keepdim=True).flatten(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
