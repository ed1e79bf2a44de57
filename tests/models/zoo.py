"""Real architectures of the transformers library, tiny and random: the same graphs as the large ones, in a second.

Each has two layers (whisper's encoder four), hidden size 64 and four heads, and sizes that divide by four. What stays
whole beside the layers (patches, low ranks, convolutions) is about as large beside them as in the models that people
use: with larger patches and low ranks a rank's share of the FLOPs is larger too. Nothing is downloaded: configurations
are written here, weights are drawn from a fixed seed.

    llama = architecture("llama")
    exported = llama.export(dynamic=True)
    exported.module()(**llama.inputs(batch=3, seq=20))
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

VOCABULARY = 128
BATCH, SEQUENCE = 2, 12
PATCHES, PATCH = 4, 4

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """One model family: how to build it and what to call it with."""

    name: str
    model: str
    configuration: str
    options: Mapping[str, Any]
    make_inputs: Callable[[int, int], Inputs]
    dynamic_dims: Mapping[str, tuple[int, ...]]
    note: str = ""
    attention: str = "sdpa"
    experts: str = ""
    """How routed experts are computed; the library's default if empty."""

    def build(self) -> torch.nn.Module:
        """The model in eval mode, float32, with the same weights at every call; no weight is zero or one."""
        transformers = library()
        config = getattr(transformers, self.configuration)(**self.options, use_cache=False)
        config._attn_implementation = self.attention
        if self.experts:
            config._experts_implementation = self.experts
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(transformers, self.model)(config).eval().float()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight), alpha=0.05)
        return model

    def inputs(self, batch: int = BATCH, seq: int = SEQUENCE) -> Inputs:
        """Keyword arguments of the model's forward, the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.make_inputs(batch, seq)

    @property
    def dynamic_shapes(self) -> dict[str, dict[int, Any]]:
        """The dims of each input that a dynamic export leaves open: batch, and sequence where there is one."""
        return {name: dict.fromkeys(dims, Dim.DYNAMIC) for name, dims in self.dynamic_dims.items()}

    def export(self, dynamic: bool = False, decomposed: bool = False) -> ExportedProgram:
        """The model exported for inference, once per process: do not change what it returns."""
        return _export(self, dynamic, decomposed)


@functools.cache
def library() -> Any:
    """The library, kept from asking the network for anything."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


_EXPORTED: dict[tuple[str, bool, bool], ExportedProgram] = {}


def _export(chosen: Architecture, dynamic: bool, decomposed: bool) -> ExportedProgram:
    key = (chosen.name, dynamic, decomposed)
    if key not in _EXPORTED:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            raw = _export(chosen, dynamic, False) if decomposed else _raw(chosen, dynamic)
            _EXPORTED[key] = raw.run_decompositions() if decomposed else raw
    return _EXPORTED[key]


def _raw(chosen: Architecture, dynamic: bool) -> ExportedProgram:
    shapes = chosen.dynamic_shapes if dynamic else None
    return torch.export.export(chosen.build(), (), chosen.inputs(), dynamic_shapes=shapes, strict=False)


def _tokens(batch: int, seq: int) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (batch, seq))


def _decoder_inputs(batch: int, seq: int) -> Inputs:
    return {"input_ids": _tokens(batch, seq)}


def _encoder_inputs(batch: int, seq: int) -> Inputs:
    mask = torch.ones(batch, seq, dtype=torch.int64)
    mask[0, seq // 2 :] = 0
    return {"input_ids": _tokens(batch, seq), "attention_mask": mask}


def _translation_inputs(batch: int, seq: int) -> Inputs:
    return {"input_ids": _tokens(batch, seq), "decoder_input_ids": _tokens(batch, seq)}


def _image_inputs(batch: int, seq: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, PATCH * PATCHES, PATCH * PATCHES)}


def _picture_and_text_inputs(batch: int, seq: int) -> Inputs:
    return {**_image_inputs(batch, seq), **_decoder_inputs(batch, seq)}


def _speech_inputs(batch: int, seq: int) -> Inputs:
    return {"input_features": torch.randn(batch, 12, 64), "decoder_input_ids": _tokens(batch, seq)}


_TEXT = {"input_ids": (0, 1)}
_MASKED = {"input_ids": (0, 1), "attention_mask": (0, 1)}
_PAIR = {"input_ids": (0, 1), "decoder_input_ids": (0, 1)}

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_EVEN = {**_SIZES, "num_key_value_heads": 4}
_OLD_GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": PATCH * PATCHES,
    "patch_size": PATCH,
}


def _decoder(name: str, prefix: str, options: Mapping[str, Any], note: str = "", **more: Any) -> Architecture:
    """A causal language model `<prefix>ForCausalLM` of a `<prefix>Config`."""
    merged = {**options, **more}
    return Architecture(name, f"{prefix}ForCausalLM", f"{prefix}Config", merged, _decoder_inputs, _TEXT, note)


def _encoder(name: str, prefix: str, options: Mapping[str, Any], note: str = "") -> Architecture:
    """A masked language model `<prefix>ForMaskedLM` of a `<prefix>Config`, with half of one sequence masked."""
    return Architecture(name, f"{prefix}ForMaskedLM", f"{prefix}Config", options, _encoder_inputs, _MASKED, note)


def _spelled_out(chosen: Architecture) -> Architecture:
    """An architecture that the library only runs with attention written as matmuls and a softmax."""
    return replace(chosen, attention="eager")


ARCHITECTURES: tuple[Architecture, ...] = (
    _decoder("llama", "Llama", _GROUPED, "grouped-query attention, rotary positions, SwiGLU"),
    _decoder("mistral", "Mistral", _GROUPED, "sliding window", sliding_window=8),
    _decoder("qwen2", "Qwen2", _GROUPED, "biases on q, k and v"),
    _decoder("qwen3", "Qwen3", _GROUPED, "norms on q and k", head_dim=16),
    _spelled_out(
        _decoder(
            "gemma2", "Gemma2", _GROUPED, "soft-capped logits, local and global layers", head_dim=16, sliding_window=8
        )
    ),
    replace(
        _decoder("gemma3", "Gemma3", _GROUPED, "two rotary bases, embedding scaled", head_dim=16, sliding_window=8),
        configuration="Gemma3TextConfig",
    ),
    _decoder("phi3", "Phi3", _EVEN, "fused qkv and fused gate_up"),
    _decoder("phi", "Phi", _EVEN, "attention and MLP in parallel, partial rotary"),
    _decoder("stablelm", "StableLm", _EVEN, "LayerNorm with partial rotary"),
    _decoder("starcoder2", "Starcoder2", _GROUPED, "plain MLP with biases"),
    _decoder("olmo2", "Olmo2", _EVEN, "norms after the blocks"),
    _decoder("granite", "Granite", _GROUPED, "scaled residuals, embedding and logits"),
    _spelled_out(_decoder("granite_swa", "GraniteSWA", _GROUPED, "sinks split with their heads", sliding_window=8)),
    replace(_decoder("gpt2", "GPT2", _OLD_GPT, "Conv1D weights, fused qkv, tied head"), model="GPT2LMHeadModel"),
    _spelled_out(_decoder("gptj", "GPTJ", _OLD_GPT, "interleaved rotary, attention and MLP in parallel", rotary_dim=8)),
    _decoder("gpt_neox", "GPTNeoX", _SIZES, "fused qkv interleaved by head, parallel residual"),
    _decoder(
        "opt",
        "OPT",
        {**_SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64},
        "learned positions with an offset, tied head",
    ),
    _spelled_out(
        _decoder(
            "bloom",
            "Bloom",
            {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4, "pad_token_id": 0},
            "ALiBi, fused qkv interleaved by head",
        )
    ),
    _decoder(
        "falcon",
        "Falcon",
        _SIZES,
        "fused qkv in groups of heads, parallel residual",
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    _decoder(
        "mixtral",
        "Mixtral",
        _GROUPED,
        "routed experts",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    _decoder("olmoe", "Olmoe", _EVEN, "routed experts, norms on q and k", num_experts=4, num_experts_per_tok=2),
    _decoder(
        "qwen2_moe",
        "Qwen2Moe",
        _EVEN,
        "routed experts and a gated shared one",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    _decoder(
        "deepseek_v3",
        "DeepseekV3",
        _EVEN,
        "latent attention, grouped routing, first layer dense",
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=32,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        intermediate_size=160,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    _spelled_out(
        _decoder(
            "gpt_oss",
            "GptOss",
            _GROUPED,
            "attention sinks, interleaved gate_up, biases on experts",
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
        )
    ),
    _spelled_out(
        _decoder(
            "mamba2",
            "Mamba2",
            {key: value for key, value in _SIZES.items() if key not in ("intermediate_size", "num_attention_heads")},
            "state space, no attention: scans in chunks",
            num_heads=8,
            head_dim=16,
            state_size=16,
            n_groups=4,
            chunk_size=8,
        )
    ),
    _encoder("bert", "Bert", _SIZES),
    _encoder("roberta", "Roberta", _SIZES, "positions counted from the padding mask"),
    _encoder("electra", "Electra", {**_SIZES, "embedding_size": 32}, "embedding narrower than the layers"),
    _encoder(
        "distilbert",
        "DistilBert",
        {"vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "pad_token_id": 0},
    ),
    Architecture(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        _translation_inputs,
        _PAIR,
        "relative position biases shared by layers, tied embedding scaled",
    ),
    Architecture(
        "bart",
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
        },
        _translation_inputs,
        _PAIR,
        "encoder and decoder with cross attention",
    ),
    Architecture(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 12,
            "d_model": 64,
            "encoder_layers": 4,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "max_source_positions": 32,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        _speech_inputs,
        {"input_features": (0,), "decoder_input_ids": (0, 1)},
        "convolutions before the encoder; k without a bias",
    ),
    Architecture(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        {**_VISION, "num_labels": 8},
        _image_inputs,
        {"pixel_values": (0,)},
        "patch convolution, class token",
    ),
    Architecture(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**_SIZES, "projection_dim": 64},
            "vision_config": {**_VISION, "projection_dim": 64},
            "projection_dim": 64,
        },
        _picture_and_text_inputs,
        {"pixel_values": (0,), "input_ids": (0, 1)},
        "two towers and a similarity",
    ),
)


def architecture(name: str) -> Architecture:
    """The architecture of that name."""
    return next(known for known in ARCHITECTURES if known.name == name)
