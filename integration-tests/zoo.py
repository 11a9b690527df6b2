"""The zoo: architectures that we did not write, with a few thousand random parameters each.

Every specimen is what a user would build, only smaller: dropout and LayerDrop stay on, parameters
stay tied, the loss is the model's own. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import feeds
import parity
import torch
from attrs import frozen
from feeds import IMAGE, LENGTH, VOCABULARY, Inputs
from torch import Generator, Tensor, nn

WIDTH: Final = 16


@frozen
class Specimen:
    """One architecture: how it is built, and what it is fed."""

    make: Callable[[], nn.Module]
    inputs: Callable[[Generator], Inputs]
    finds_unused: bool = False  # what DDP must be told: some parameters get no gradient

    def build(self, rank: int) -> nn.Module:
        """The same on every rank; from now on each has its own dropout and drops its own layers."""
        model = self.make()
        torch.manual_seed(1000 + rank)
        return model

    def batch(self, step: int, micro: int, rank: int) -> Inputs:
        """Arguments of forward, different for every step, micro-batch and rank."""
        return self.inputs(torch.Generator().manual_seed(10_000 * step + 100 * micro + rank))

    def recipe(self, rank: int, **settings: Any) -> parity.Recipe:
        """Three steps of it, unless `settings` say otherwise."""
        defaults: dict[str, Any] = {
            "optimizer": "adamw-fused",
            "num_steps": 3,
            "make": lambda: self.build(rank),
            "batch": self.batch,
            "loss_of": loss_of,
            "finds_unused": self.finds_unused,
        }
        return parity.Recipe(**(defaults | settings))


def loss_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """The model's own loss; for a model without one, the mean square of its first output."""
    output = model(**inputs)
    loss = output.get("loss") if isinstance(output, Mapping) else None
    return output[0].float().square().mean() if loss is None else loss


# ---- How they are built ----


def _of(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A class of transformers, over a configuration of transformers."""

    def make() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()  # advice about kernels that are not installed
        shape = getattr(transformers, config)(**settings)
        return getattr(transformers, model)(shape).train()

    return make


def _lora(make: Callable[[], nn.Module], dtype: torch.dtype, *targets: str) -> nn.Module:
    """Adapters in fp32, which `peft` makes trainable, over a frozen base in `dtype`."""
    import peft

    base = make().to(dtype)
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=list(targets))
    return peft.get_peft_model(base, config).train()


_IDS: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS: Final = {"num_hidden_layers": 3, "num_attention_heads": 2}
_ENCODER: Final = {"hidden_size": WIDTH, "intermediate_size": 24, **_LAYERS}
_TEXT: Final = {"vocab_size": VOCABULARY, "max_position_embeddings": 2 * LENGTH, **_ENCODER, **_IDS}
_ROPE: Final = {**_TEXT, "num_key_value_heads": 1}
_TOWERS: Final = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": WIDTH,
    "vocab_size": VOCABULARY, "decoder_start_token_id": 1, **_IDS,
}  # fmt: skip
_LATENT: Final = {
    **_ROPE, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 1,
}  # fmt: skip
_RECURRENT: Final = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3, **_IDS}

_LLAMA: Final = _of("LlamaForCausalLM", "LlamaConfig", **_ROPE)

DECODERS: Final = {
    "gpt2": Specimen(
        _of(
            "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_layer=3, n_head=2,
            n_embd=WIDTH, n_positions=2 * LENGTH, **_IDS,
        ),
        feeds.text,
    ),
    "llama": Specimen(_LLAMA, feeds.text),
    "gemma": Specimen(_of("GemmaForCausalLM", "GemmaConfig", **_ROPE, head_dim=8), feeds.text),
    "gemma3": Specimen(
        _of("Gemma3ForCausalLM", "Gemma3TextConfig", **_ROPE, head_dim=8, sliding_window=4),
        feeds.text,
    ),
    "gpt-neox": Specimen(_of("GPTNeoXForCausalLM", "GPTNeoXConfig", **_TEXT), feeds.text),
    "bloom": Specimen(
        _of(
            "BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=3,
            n_head=2, hidden_dropout=0.1, **_IDS,
        ),
        feeds.text,
    ),
    "opt": Specimen(
        _of(
            "OPTForCausalLM", "OPTConfig", **_TEXT, ffn_dim=24, word_embed_proj_dim=8, layerdrop=0.3
        ),
        feeds.text,
        finds_unused=True,
    ),
    "xlnet": Specimen(
        _of(
            "XLNetLMHeadModel", "XLNetConfig", vocab_size=VOCABULARY, d_model=WIDTH, n_layer=3,
            n_head=2, d_inner=24,
        ),
        feeds.full_text,
        finds_unused=True,  # segment embeddings
    ),
}  # fmt: skip

EXPERTS: Final = {
    "qwen2-moe": Specimen(
        _of(
            "Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_ROPE, moe_intermediate_size=8,
            shared_expert_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
            output_router_logits=True,
        ),
        feeds.text,
    ),
    "mixtral": Specimen(
        _of(
            "MixtralForCausalLM", "MixtralConfig", **_ROPE, num_local_experts=4,
            num_experts_per_tok=2,
        ),
        feeds.text,
    ),
    "deepseek-v2": Specimen(
        _of("DeepseekV2ForCausalLM", "DeepseekV2Config", **_LATENT), feeds.text
    ),
    "deepseek-v3": Specimen(
        _of("DeepseekV3ForCausalLM", "DeepseekV3Config", **_LATENT), feeds.text
    ),
    "switch": Specimen(
        _of(
            "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2,
            num_decoder_layers=2, num_heads=2, num_experts=4, num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1, decoder_start_token_id=0,
        ),
        feeds.translation,
        finds_unused=True,  # experts that no token chose
    ),
}  # fmt: skip

ENCODERS_AND_DECODERS: Final = {
    "t5": Specimen(
        _of(
            "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8,
            d_ff=24, num_layers=3, num_heads=2, decoder_start_token_id=0, pad_token_id=0,
            eos_token_id=2,
        ),
        feeds.translation,
    ),
    "bart": Specimen(
        _of(
            "BartForConditionalGeneration", "BartConfig", **_TOWERS, encoder_layerdrop=0.3,
            max_position_embeddings=2 * LENGTH, forced_eos_token_id=None,
        ),
        feeds.translation,
        finds_unused=True,
    ),
    "whisper": Specimen(
        _of(
            "WhisperForConditionalGeneration", "WhisperConfig", **_TOWERS, num_mel_bins=4,
            max_source_positions=LENGTH, max_target_positions=2 * LENGTH, dropout=0.1,
            suppress_tokens=None, begin_suppress_tokens=None,
        ),
        feeds.spectrum,
    ),
}  # fmt: skip

ENCODERS: Final = {
    "bert": Specimen(_of("BertForMaskedLM", "BertConfig", **_TEXT), feeds.text),
    "bert-to-classify": Specimen(
        _of("BertForSequenceClassification", "BertConfig", **_TEXT, num_labels=3),
        feeds.classified_text,
    ),
    "albert": Specimen(
        _of("AlbertForMaskedLM", "AlbertConfig", **_TEXT, embedding_size=8, inner_group_num=2),
        feeds.text,
    ),
    "deberta-v2": Specimen(
        _of(
            "DebertaV2ForMaskedLM", "DebertaV2Config", **_TEXT, relative_attention=True,
            position_buckets=4, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm",
            conv_kernel_size=3,
        ),
        feeds.text,
    ),
    "funnel": Specimen(
        _of(
            "FunnelForMaskedLM", "FunnelConfig", vocab_size=VOCABULARY, d_model=WIDTH, n_head=2,
            block_sizes=[1, 1], d_head=8, d_inner=24,
        ),
        feeds.text,
    ),
    "perceiver": Specimen(
        _of(
            "PerceiverForMaskedLM", "PerceiverConfig", vocab_size=VOCABULARY, d_model=WIDTH,
            d_latents=16, num_latents=4, num_blocks=2, num_self_attends_per_block=2,
            num_self_attention_heads=2, num_cross_attention_heads=2, qk_channels=16, v_channels=16,
            max_position_embeddings=LENGTH,
        ),
        feeds.text,
    ),
    "wav2vec2": Specimen(
        _of(
            "Wav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=VOCABULARY, **_ENCODER, conv_dim=[8, 8],
            conv_kernel=[10, 3], conv_stride=[10, 2], num_feat_extract_layers=2, layerdrop=0.3,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
            ctc_loss_reduction="mean", ctc_zero_infinity=True,
        ),
        feeds.wave,
        finds_unused=True,
    ),
}  # fmt: skip

VISION: Final = {
    "vit": Specimen(
        _of(
            "ViTForImageClassification", "ViTConfig", **_ENCODER, image_size=8, patch_size=4,
            num_labels=3, hidden_dropout_prob=0.1,
        ),
        feeds.image,
    ),
    "swin": Specimen(
        _of(
            "SwinForImageClassification", "SwinConfig", image_size=8, patch_size=2, embed_dim=8,
            depths=[2, 1], num_heads=[2, 2], window_size=2, num_labels=3,
        ),
        feeds.image,
    ),
    "convnext": Specimen(
        _of(
            "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 2],
            num_stages=2, patch_size=2, num_labels=3, drop_path_rate=0.3,
        ),
        feeds.image,
    ),
    "resnet": Specimen(
        _of(
            "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16],
            depths=[2, 2], num_labels=3,
        ),
        feeds.image,
    ),
    "detr": Specimen(
        _of(
            "DetrForObjectDetection", "DetrConfig", use_timm_backbone=False, backbone=None,
            use_pretrained_backbone=False, backbone_config={
                "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 8, 8],
                "depths": [1, 1, 1, 1], "out_features": ["stage4"],
            },
            d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_queries=3,
            num_labels=3,
        ),
        lambda generator: feeds.pixels(generator, 32),
        finds_unused=True,  # boxes, which have no part in the mean square of the logits
    ),
    "clip": Specimen(
        _of(
            "CLIPModel", "CLIPConfig", text_config={**_TEXT}, projection_dim=8,
            vision_config={**_ENCODER, "image_size": 8, "patch_size": 4},
        ),
        feeds.caption,
    ),
    "llava": Specimen(
        _of(
            "LlavaForConditionalGeneration", "LlavaConfig", image_token_id=IMAGE,
            text_config={**_ROPE, "model_type": "llama"},
            vision_config={
                **_ENCODER, "image_size": 8, "patch_size": 4, "model_type": "clip_vision_model",
            },
        ),
        feeds.illustrated_text,
        finds_unused=True,  # the last layer of the vision tower
    ),
}  # fmt: skip

RECURRENT: Final = {
    "mamba": Specimen(
        _of("MambaForCausalLM", "MambaConfig", **_RECURRENT, state_size=4), feeds.text
    ),
    "mamba2": Specimen(
        _of(
            "Mamba2ForCausalLM", "Mamba2Config", **_RECURRENT, state_size=4, num_heads=4,
            head_dim=8, n_groups=1, chunk_size=4,
        ),
        feeds.text,
    ),
    "rwkv": Specimen(
        _of("RwkvForCausalLM", "RwkvConfig", **_RECURRENT, context_length=LENGTH), feeds.full_text
    ),
    "jamba": Specimen(
        _of(
            "JambaForCausalLM", "JambaConfig", **_ROPE, mamba_d_state=4, num_experts=4,
            attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        ),
        feeds.text,
    ),
    "zamba2": Specimen(
        _of(
            "Zamba2ForCausalLM", "Zamba2Config", **{**_ROPE, "num_hidden_layers": 4},
            mamba_d_state=4, n_mamba_heads=2, mamba_headdim=16, mamba_ngroups=1, chunk_size=4,
            layers_block_type=["mamba", "hybrid"] * 2, hybrid_layer_ids=[1, 3], num_mem_blocks=1,
            attention_head_dim=16,
        ),
        feeds.text,  # two of its layers share one attention block, and adapt it
    ),
}  # fmt: skip

LORA: Final = {
    "lora": Specimen(lambda: _lora(_LLAMA, torch.float32, "q_proj", "v_proj"), feeds.text),
    "lora-over-bf16": Specimen(
        lambda: _lora(_LLAMA, torch.bfloat16, "q_proj", "down_proj", "embed_tokens"),
        feeds.text,
    ),
    "lora-over-experts": Specimen(
        lambda: _lora(EXPERTS["qwen2-moe"].make, torch.bfloat16, "k_proj", "shared_expert_gate"),
        feeds.text,
    ),
}

ZOO: Final[dict[str, Specimen]] = {
    **DECODERS, **EXPERTS, **ENCODERS_AND_DECODERS, **ENCODERS, **VISION, **RECURRENT, **LORA,
}  # fmt: skip

# Not every comparison is possible for these: see the tests that use them.

SAM: Final = Specimen(
    _of(
        "SamModel", "SamConfig",
        vision_config={
            **_ENCODER, "mlp_dim": 24, "output_channels": 16, "image_size": 16, "patch_size": 4,
            "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 8,
        },
        prompt_encoder_config={
            "hidden_size": 16, "image_size": 16, "patch_size": 4, "mask_input_channels": 4,
        },
        mask_decoder_config={
            "hidden_size": 16, "mlp_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "iou_head_hidden_dim": 16,
        },
    ),
    feeds.points,
    finds_unused=True,
)  # fmt: skip

REFORMER: Final = Specimen(
    _of(
        "ReformerModelWithLMHead", "ReformerConfig", vocab_size=VOCABULARY, hidden_size=WIDTH,
        num_attention_heads=2, attention_head_size=8, attn_layers=["local", "lsh", "local"],
        feed_forward_size=24, axial_pos_shape=[2, 4], axial_pos_embds_dim=[8, 8],
        local_attn_chunk_length=4, lsh_attn_chunk_length=4, is_decoder=True, num_buckets=2,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0, hash_seed=1,
    ),
    feeds.full_text,
)  # fmt: skip
