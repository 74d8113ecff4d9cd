"""``Qwen3OmniTalker``: the thinker's rows to frames of codes, on vLLM's mixture of experts with paged attention.

A row of the thinker is the embedding of a text token, and what a middle layer returns at media. T and H are the
talker's projections of the two, C is its codec embedding.

    prompt     user's turns      T(row), at media H(row)
               header            T(row): <|im_start|> assistant \\n
               tags              T(tts_pad) + C(nothink, think_bos, think_eos, speaker)
                                 T(tts_bos) + C(pad)
               reply             T(its first row) + C(bos)
    decode k   the frame's codes + T(row k + 1 of the reply), then T(tts_eos), then T(tts_pad)   (``FrameTalker``)

The prompt's ids are padding codes, which are never sampled: penalties count generated codes only, as the reference's.

From: transformers' ``Qwen3OmniMoeForConditionalGeneration.generate``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from vllm_omni.model_executor.frame_talker import FrameTalker, TextProjection
from vllm_omni.model_executor.models.qwen3_omni_moe.layout import TalkerLayout, talker_positions
from vllm_omni.model_executor.stage_model import RequestInfo, check_all_loaded
from vllm_omni.speech.code_predictor import CodePredictor, PredictorConfig

MODEL_TYPE = "qwen3_omni_moe"
THINKER_EMBEDDING = "thinker.model.embed_tokens.weight"
TAGS = ("nothink", "think_bos", "think_eos")  # then the speaker, the pad and the bos


def talker_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the talker stage: the language model of the checkpoint's talker section, with the fields that
    only the talker reads."""
    if config.model_type != MODEL_TYPE:  # vLLM also passes a dummy, to ask whether the model type changes
        return config
    talker = config.talker_config
    made = talker.text_config
    made.architectures = ["Qwen3OmniTalker"]
    made.decoder_sparse_step, made.mlp_only_layers = 1, []  # every layer has experts, whatever the file says
    made.code_predictor_config = talker.code_predictor_config.to_dict()
    made.thinker_hidden_size = talker.thinker_hidden_size
    made.codec_eos_token_id = talker.codec_eos_token_id
    made.codec_ids = {name: getattr(talker, f"codec_{name}_id") for name in (*TAGS, "pad", "bos")}
    made.text_ids = [getattr(config, f"tts_{name}_token_id") for name in ("pad", "bos", "eos")]
    return made


@support_torch_compile(
    # Upstream's class is compiled for positions of [num_tokens]; these are [3, num_tokens].
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class TalkerModel(Qwen3MoeModel):
    """Qwen3-MoE's decoder with positions of three axes."""


class Qwen3OmniTalker(FrameTalker, SupportsMRoPE):
    """The codec language model; see the module's docstring for what each position reads."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.": "",
            "thinker.": None,
            "code2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.end_code = config.codec_eos_token_id
        self.model = TalkerModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        sizes = config.thinker_hidden_size, config.intermediate_size, config.hidden_size
        self.text_projection = TextProjection(*sizes)
        self.hidden_projection = TextProjection(*sizes)
        self.codec_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "codec_head")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.code_predictor = CodePredictor(PredictorConfig.of(config.code_predictor_config), config.hidden_size)
        # Rows of the thinker's embedding: tts_pad, tts_bos, tts_eos.
        self.register_buffer("text_rows", torch.zeros(3, config.thinker_hidden_size), persistent=False)
        self.has_text_rows = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = AutoWeightsLoader(self).load_weights(self._take_text_rows(weights), mapper=self.hf_to_vllm_mapper)
        if not self.has_text_rows:
            raise ValueError(f"the checkpoint has no {THINKER_EMBEDDING}, some rows of which the talker reads")
        check_all_loaded(self, loaded)
        return loaded

    def _take_text_rows(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name == THINKER_EMBEDDING:
                self.text_rows.copy_(tensor[self.config.text_ids])
                self.has_text_rows = True
            else:
                yield name, tensor

    # -- hooks of a stage model ---------------------------------------------------------------------------------------

    def load_request(self, info: RequestInfo, payloads: Sequence[dict[str, Any]]) -> None:
        """Compute the prompt's rows, but for the last one, which completes with the reply's first row.

        Args:
            info: ``args`` has ``layout``, the fields of a ``TalkerLayout``; ``speaker_id``, a codec id; and what
                ``open_frames`` reads.
            payloads: the rows of the thinker's prompt, and maybe of the reply, with the prompt's positions.
        """
        layout = TalkerLayout(**info.args["layout"])
        if payloads[0]["first_row"] != 0:
            raise ValueError(f"rows start at {payloads[0]['first_row']}: the thinker did not compute its prompt")
        rows = torch.cat([payload["rows"] for payload in payloads if "rows" in payload]).to(self.text_rows)
        if len(rows) < layout.reply_start or info.num_prompt_tokens != layout.num_prompt_tokens:
            raise ValueError(f"{len(rows)} rows, {info.num_prompt_tokens} tokens do not match the prompt's layout")
        positions = payloads[0]["positions"].to(torch.int64).numpy()
        info.state["positions"] = torch.from_numpy(talker_positions(positions, layout))
        pad, bos, eos = self.text_projection(self.text_rows)
        codec = self.config.codec_ids
        ids = [*(codec[name] for name in TAGS), info.args["speaker_id"], codec["pad"], codec["bos"]]
        added = self.embed_input_ids(torch.tensor(ids, device=rows.device))
        added[:4] += pad
        added[4] += bos
        header = self.text_projection(rows[layout.reply_start - 3 : layout.reply_start])
        info.state["prompt"] = torch.cat([self._user_rows(rows, layout), header, added])
        info.state |= {"tail": [], "pad": pad, "eos": eos, "has_reply": False}
        self.open_frames(info)
        self.extend_request(info, rows[layout.reply_start :], last=False)

    def _user_rows(self, rows: torch.Tensor, layout: TalkerLayout) -> torch.Tensor:
        """Projected rows of the user's turns."""
        is_media = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for start, end in layout.media:
            is_media[start:end] = True
        is_read = torch.zeros_like(is_media)
        for start, end in layout.turns:
            is_read[start:end] = True
        is_media, rows = is_media[is_read], rows[is_read]
        projected = rows.new_empty(len(rows), self.config.hidden_size)
        projected[~is_media] = self.text_projection(rows[~is_media])
        projected[is_media] = self.hidden_projection(rows[is_media])
        return projected

    def extend_request(self, info: RequestInfo, rows: torch.Tensor | None, last: bool) -> None:
        """Append rows of the reply: the first completes the prompt, the others form the tail, which the end closes."""
        state = info.state
        if rows is not None and len(rows):
            projected = self.text_projection(rows.to(self.text_rows))
            if not state["has_reply"]:
                state["has_reply"] = True
                state["prompt"][-1] += projected[0]
                projected = projected[1:]
            state["tail"] += projected.unbind()
        if last:
            state["tail"].append(state["eos"])

    def init_mrope_positions(self, info: RequestInfo) -> tuple[torch.Tensor, int]:
        positions = info.state.pop("positions")
        return positions, int(positions.max()) + 1 - info.num_prompt_tokens
