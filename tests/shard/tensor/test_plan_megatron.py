"""Plans found in graphs: which projections are paired, how fused ones are cut, and what stays whole and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from crossfade.shard.tensor.plan import Plan
from tests.models.choice import some


def found(model: nn.Module, *inputs: torch.Tensor, vocab: bool = False, dynamic: bool = False) -> Plan:
    shapes = tuple({0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for _ in inputs) if dynamic else None
    return Plan.megatron(torch.export.export(model, inputs, dynamic_shapes=shapes), vocab)


class Attention(nn.Module):
    """Self-attention of four heads of four channels on a width of 16, in any of the ways people cut a fused qkv."""

    def __init__(self, cut: str, eager: bool = False) -> None:
        super().__init__()
        self.cut, self.eager = cut, eager
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        batch, length, _ = x.shape
        fused = self.qkv(x)
        if self.cut == "chunk":
            return [part.view(batch, length, 4, 4).transpose(1, 2) for part in fused.chunk(3, -1)]
        if self.cut == "slice":
            parts = fused[..., :16], fused[..., 16:32], fused[..., 32:]
            return [part.view(batch, length, 4, 4).transpose(1, 2) for part in parts]
        if self.cut == "three first":
            return list(fused.reshape(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0))
        if self.cut == "heads first":
            return [part.transpose(1, 2) for part in fused.view(batch, length, 4, 12).chunk(3, -1)]
        every = fused.view(batch, length, 4, 3, 4)
        return [every[..., i, :].transpose(1, 2) for i in range(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(self.norm(x))
        if self.eager:
            mixed = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("cut", "style"),
    [
        ("chunk", {"style": "colwise", "blocks": 3}),
        ("slice", {"style": "colwise", "blocks": 3}),
        ("three first", {"style": "colwise", "blocks": 3}),
        ("heads first", "colwise"),
        ("heads then three", "colwise"),
    ],
)
def test_fused_projections_are_cut_where_the_graph_cuts_them(cut: str, style: Any, eager: bool, dynamic: bool) -> None:
    plan = found(nn.Sequential(Attention(cut, eager)), torch.randn(2, 6, 16), dynamic=dynamic)
    assert plan == Plan({"0.qkv": style, "0.out": "rowwise"})
    assert plan.notes == ()


def test_grouped_keys_make_blocks_of_different_sizes() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 32), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).split([16, 8, 8], -1)
            q = q.view(2, 6, 4, 4).transpose(1, 2)
            k, v = (tensor.view(2, 6, 2, 4).transpose(1, 2) for tensor in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.out(mixed.transpose(1, 2).reshape(2, 6, 16))

    plan = found(nn.Sequential(Grouped()), torch.randn(2, 6, 16))
    assert plan == Plan({"0.qkv": {"style": "colwise", "blocks": [16, 8, 8]}, "0.out": "rowwise"})


def test_one_key_head_for_all_cannot_be_split() -> None:
    class OneKey(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x).view(2, 6, 4, 4).transpose(1, 2)
            k, v = (linear(x).view(2, 6, 1, 4).transpose(1, 2).expand(2, 4, 6, 4) for linear in (self.k, self.v))
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 16))

    plan = found(nn.Sequential(OneKey()), torch.randn(2, 6, 16))
    assert plan == Plan({"0.q": "colwise", "0.out": "rowwise"})
    assert [note.split(":")[0] for note in plan.notes] == ["*.k.weight stays whole", "*.v.weight stays whole"]


class Gated(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.gate_up = nn.Linear(8, 64) if fused else None
        self.gate, self.up = (None, None) if fused else (nn.Linear(8, 32), nn.Linear(8, 32))
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1) if self.gate_up else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


def test_gated_mlps() -> None:
    layers = nn.Sequential(Gated(fused=False), nn.LayerNorm(8), Gated(fused=False))
    assert found(layers, torch.randn(3, 8)) == Plan({"*.gate": "colwise", "*.up": "colwise", "*.down": "rowwise"})
    assert found(Gated(fused=True), torch.randn(3, 8)) == Plan({"gate_up": "packed_colwise", "down": "rowwise"})


def test_interleaved_halves_need_no_blocks() -> None:
    class Interleaved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up, self.down = nn.Linear(8, 64), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both = self.gate_up(x)
            return self.down(both[..., ::2] * both[..., 1::2])

    assert found(Interleaved(), torch.randn(3, 8)) == Plan({"gate_up": "colwise", "down": "rowwise"})


def test_three_in_a_row_pair_the_first_two() -> None:
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = found(layers, torch.randn(3, 8))
    assert plan == Plan({"0": "colwise", "2": "rowwise"})
    assert plan.notes == ("*.weight stays whole: no other projection contracts over what it puts out",)


def test_what_a_softmax_needs_whole_stays_whole() -> None:
    plan = found(nn.Sequential(nn.Linear(8, 16), nn.Softmax(-1), nn.Linear(16, 8)), torch.randn(3, 8))
    assert plan == Plan({})
    assert plan.notes[0] == "*.weight stays whole: softmax in 1 needs all that it puts out"


def test_what_activations_contract_over_stays_whole() -> None:
    class Similar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.last = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.one(x) @ self.other(x).transpose(-1, -2))

    plan = found(Similar(), torch.randn(2, 4, 8))
    assert plan == Plan({})
    assert plan.notes[:2] == (
        "one.weight stays whole: matmul needs all that it puts out",
        "other.weight stays whole: matmul needs all that it puts out",
    )


def test_overlapping_parts_stay_whole() -> None:
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(24, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = self.up(x)
            return self.down(wide[..., :24] * wide[..., 8:])

    plan = found(Overlapping(), torch.randn(3, 8))
    assert plan == Plan({})
    assert plan.notes[0] == "up.weight stays whole: parts of what it puts out overlap, or are not used"


def test_multihead_attention_is_named_by_parameter() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    exported = torch.export.export(Block(), (torch.randn(2, 6, 16),))
    plan = Plan.megatron(exported)
    assert plan == Plan(
        {
            "attention.in_proj_weight": {"style": "colwise", "blocks": 3},
            "attention.in_proj_bias": {"style": "colwise", "blocks": 3},
            "attention.out_proj.weight": "rowwise",
            "attention": "all_reduce",
        }
    )
    resolved = plan.resolve(exported, 2).parameters
    assert resolved["attention.in_proj_weight"].blocks == resolved["attention.in_proj_bias"].blocks == (16, 16, 16)


LLAMA = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
EXPERTS = {
    "model.layers.*.mlp.experts.gate_up_proj": {"style": "shard(1)", "blocks": 2},
    "model.layers.*.mlp.experts.down_proj": "shard(2)",
    "model.layers.*.mlp.experts": "moe_tp_experts",
}


def attention(prefix: str, *names: str) -> dict[str, str]:
    return {f"{prefix}.{name}": "colwise" for name in names[:-1]} | {f"{prefix}.{names[-1]}": "rowwise"}


def bert_like(prefix: str) -> dict[str, str]:
    return {
        **attention(f"{prefix}.layer.*.attention", "self.query", "self.key", "self.value", "output.dense"),
        **attention(f"{prefix}.layer.*", "intermediate.dense", "output.dense"),
    }


def bart_like(part: str, *blocks: str) -> dict[str, str]:
    each = [attention(f"{part}.layers.*.{block}", "q_proj", "k_proj", "v_proj", "out_proj") for block in blocks]
    return {name: style for styles in each for name, style in styles.items()} | attention(
        f"{part}.layers.*", "fc1", "fc2"
    )


BLOOM = {
    **attention("transformer.h.*.self_attention", "query_key_value", "dense"),
    **attention("transformer.h.*.mlp", "dense_h_to_4h", "dense_4h_to_h"),
}
FOUND: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "stablelm", "granite"), LLAMA),
    "phi3": {
        "model.layers.*.self_attn.qkv_proj": {"style": "colwise", "blocks": 3},
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_up_proj": "packed_colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
    "phi": {
        **attention("model.layers.*.self_attn", "q_proj", "k_proj", "v_proj", "dense"),
        **attention("model.layers.*.mlp", "fc1", "fc2"),
    },
    "starcoder2": {
        **attention("model.layers.*.self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
        **attention("model.layers.*.mlp", "c_fc", "c_proj"),
    },
    "gpt2": {
        "transformer.h.*.attn.c_attn": {"style": "colwise", "blocks": 3},
        "transformer.h.*.attn.c_proj": "rowwise",
        **attention("transformer.h.*.mlp", "c_fc", "c_proj"),
    },
    "gptj": {
        **attention("transformer.h.*.attn", "q_proj", "k_proj", "v_proj", "out_proj"),
        **attention("transformer.h.*.mlp", "fc_in", "fc_out"),
    },
    "gpt_neox": {
        **attention("gpt_neox.layers.*.attention", "query_key_value", "dense"),
        **attention("gpt_neox.layers.*.mlp", "dense_h_to_4h", "dense_4h_to_h"),
    },
    **dict.fromkeys(("bloom", "falcon"), BLOOM),
    "opt": {
        **attention("model.decoder.layers.*.self_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
        **attention("model.decoder.layers.*", "fc1", "fc2"),
    },
    "mixtral": {**attention("model.layers.*.self_attn", "q_proj", "k_proj", "v_proj", "o_proj"), **EXPERTS},
    "gpt_oss": {
        **attention("model.layers.*.self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
        "model.layers.*.mlp.experts.gate_up_proj": "shard(2)",
        "model.layers.*.mlp.experts.down_proj": "shard(1)",
        "model.layers.*.mlp.experts": "moe_tp_experts",
    },
    "qwen2_moe": {
        **attention("model.layers.*.self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
        **attention("model.layers.*.mlp.shared_expert", "gate_proj", "up_proj", "down_proj"),
        **EXPERTS,
    },
    "bert": bert_like("bert.encoder"),
    "roberta": bert_like("roberta.encoder"),
    "electra": bert_like("electra.encoder"),
    "distilbert": {
        **attention("distilbert.transformer.layer.*.attention", "q_lin", "k_lin", "v_lin", "out_lin"),
        **attention("distilbert.transformer.layer.*.ffn", "lin1", "lin2"),
    },
    "t5": {
        **attention("encoder.block.*.layer.*.SelfAttention", "q", "k", "v", "o"),
        **attention("encoder.block.*.layer.*.DenseReluDense", "wi", "wo"),
        **attention("decoder.block.*.layer.*.SelfAttention", "q", "k", "v", "o"),
        **attention("decoder.block.*.layer.*.EncDecAttention", "q", "k", "v", "o"),
        **attention("decoder.block.*.layer.*.DenseReluDense", "wi", "wo"),
    },
    **dict.fromkeys(
        ("bart", "whisper"),
        bart_like("model.encoder", "self_attn") | bart_like("model.decoder", "self_attn", "encoder_attn"),
    ),
    "vit": {
        **attention("vit.layers.*.attention", "q_proj", "k_proj", "v_proj", "o_proj"),
        **attention("vit.layers.*.mlp", "fc1", "fc2"),
    },
    "clip": {
        f"{tower}.encoder.layers.*.{name}": style
        for tower in ("vision_model", "text_model")
        for name, style in {
            **attention("self_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
            **attention("mlp", "fc1", "fc2"),
        }.items()
    },
    "olmo2": LLAMA,
    "mamba2": {
        "backbone.layers.*.mixer.in_proj": {"style": "colwise", "blocks": [128, 128, 64, 64, 8]},
        "backbone.layers.*.mixer.out_proj": "rowwise",
    },
}


@pytest.mark.parametrize(
    ("name", "dynamic"),
    some((name, False) for name in FOUND)
    + some(((name, True) for name in ("llama", "gpt2", "bloom", "falcon", "t5", "gpt_oss")), often=("gpt2",)),
)
def test_real_architectures(name: str, dynamic: bool) -> None:
    pytest.importorskip("transformers")
    from tests.models.zoo import architecture

    exported = architecture(name).export(dynamic)
    plan = Plan.megatron(exported)
    assert plan == Plan(FOUND[name])
    assert not any(sharding.units for sharding in plan.resolve(exported, 2).parameters.values())


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("llama", {"lm_head": "colwise_gather_output", "model.embed_tokens": "rowwise"}),
        ("gpt2", {"lm_head": "colwise_gather_output", "transformer.wte": "rowwise"}),
        (
            "distilbert",
            {"vocab_projector": "colwise_gather_output", "distilbert.embeddings.word_embeddings": "rowwise"},
        ),
        (
            "t5",
            {
                "lm_head": "colwise_gather_output",
                "encoder.embed_tokens": "rowwise",
                "decoder.embed_tokens": "rowwise",
            },
        ),
        ("clip", {"text_model.embeddings.token_embedding": "rowwise"}),
        ("vit", {}),
    ],
)
def test_vocabularies_are_split_on_request(name: str, entries: dict[str, str]) -> None:
    pytest.importorskip("transformers")
    from tests.models.zoo import architecture

    exported = architecture(name).export()
    plan = Plan.megatron(exported, vocab=True)
    assert plan == Plan({**FOUND[name], **entries})
    plan.resolve(exported, 2)


def test_what_stays_whole_is_listed() -> None:
    pytest.importorskip("transformers")
    from tests.models.zoo import architecture

    assert Plan.megatron(architecture("mixtral").export()).notes == (
        "model.layers.*.mlp.gate.weight stays whole: softmax in model.layers.*.mlp.gate needs all that it puts out",
        "lm_head.weight stays whole: no other projection contracts over what it puts out",
    )
