"""Settings of the configurations of transformers models that set a model's sizes."""

from math import isqrt

from holdfast_lab.study.attnchecker.subjects import Options, Size

PAD = 0
PATCH = 4  # pixels a side


def _encoder(size: Size) -> dict[str, object]:
    """Return the settings that BERT, OPT and Llama have in common."""
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
    }


def bert(options: Options) -> dict[str, object]:
    """Return the configuration settings of BERT and RoBERTa for these sizes."""
    size = options.size
    return {
        **_encoder(size),
        "intermediate_size": size.inner,
        "max_position_embeddings": size.length + 1,  # RoBERTa reserves one for padding
        "hidden_dropout_prob": options.dropout,
        "attention_probs_dropout_prob": options.dropout,
    }


def vit(options: Options) -> dict[str, object]:
    """Return the settings of ViT, on square images of at most ``length`` patches."""
    settings = bert(options)
    image = {"image_size": PATCH * isqrt(options.size.length), "patch_size": PATCH}
    for name in ("vocab_size", "max_position_embeddings"):
        del settings[name]
    return settings | image


def gpt2(options: Options) -> dict[str, object]:
    """Return the configuration settings of GPT-2 for these sizes."""
    size = options.size
    return {
        "vocab_size": size.vocabulary,
        "n_embd": size.width,
        "n_layer": size.layers,
        "n_head": size.heads,
        "n_inner": size.inner,
        "n_positions": size.length,
        "bos_token_id": 1,
        "eos_token_id": 1,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.dropout),
    }


def gpt_neo(options: Options) -> dict[str, object]:
    """Return the settings of GPT-Neo, whose layers alternate global and local attention."""
    size = options.size
    kinds = ["global", "local"] if size.layers % 2 == 0 else ["global"]
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_layers": size.layers,
        "num_heads": size.heads,
        "intermediate_size": size.inner,
        "max_position_embeddings": size.length,
        "attention_types": [[kinds, size.layers // len(kinds)]],
        "window_size": min(256, max(2, size.length // 2)),
        "bos_token_id": 1,
        "eos_token_id": 1,
        **dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), options.dropout),
    }


def opt(options: Options) -> dict[str, object]:
    """Return the configuration settings of OPT for these sizes."""
    size = options.size
    return {
        **_encoder(size),
        "word_embed_proj_dim": size.width,
        "ffn_dim": size.inner,
        "max_position_embeddings": size.length,
        "dropout": options.dropout,
        "attention_dropout": options.dropout,
    }


def llama(options: Options) -> dict[str, object]:
    """Return the settings of Llama, with rotary positions and two query heads for each key head."""
    size = options.size
    return {
        **_encoder(size),
        "num_key_value_heads": max(1, size.heads // 2),
        "intermediate_size": size.inner,
        "max_position_embeddings": size.length,
        "attention_dropout": options.dropout,
    }


def t5(options: Options) -> dict[str, object]:
    """Return the settings of T5, which adds a position bias to the attention scores."""
    size = options.size
    return {
        "vocab_size": size.vocabulary,
        "d_model": size.width,
        "d_kv": size.width // size.heads,
        "num_layers": size.layers,
        "num_heads": size.heads,
        "d_ff": size.inner,
        "decoder_start_token_id": PAD,
        "dropout_rate": options.dropout,
    }
