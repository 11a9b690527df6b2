"""What the zoo is fed: arguments of a forward, drawn at random."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Generator, Tensor

VOCABULARY: Final = 31
LENGTH: Final = 8  # of a text, in tokens
ROWS: Final = 2  # of a batch
IMAGE: Final = VOCABULARY - 1  # the token that stands for a patch of an image

Inputs = dict[str, Any]


def draw_tokens(generator: Generator, length: int = LENGTH) -> Tensor:
    """(ROWS, length), none of them special."""
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)


def draw_classes(generator: Generator) -> Tensor:
    """One of three per row."""
    return torch.randint(3, (ROWS,), generator=generator)


def text(generator: Generator) -> Inputs:
    """Tokens that are their own labels; the last row is shorter."""
    tokens = draw_tokens(generator)
    mask = torch.ones_like(tokens)
    mask[-1, LENGTH // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def full_text(generator: Generator) -> Inputs:
    """Tokens that are their own labels."""
    tokens = draw_tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def classified_text(generator: Generator) -> Inputs:
    """Tokens and a class."""
    return {"input_ids": draw_tokens(generator), "labels": draw_classes(generator)}


def translation(generator: Generator) -> Inputs:
    """Tokens in, fewer tokens out."""
    return {"input_ids": draw_tokens(generator), "labels": draw_tokens(generator, LENGTH // 2)}


def pixels(generator: Generator, size: int = 8) -> Inputs:
    """Images of three channels."""
    return {"pixel_values": torch.randn(ROWS, 3, size, size, generator=generator)}


def image(generator: Generator) -> Inputs:
    """Pixels and what is on them."""
    return {**pixels(generator), "labels": draw_classes(generator)}


def caption(generator: Generator) -> Inputs:
    """Pixels and tokens that belong together."""
    return {**pixels(generator), "input_ids": draw_tokens(generator), "return_loss": True}


def illustrated_text(generator: Generator) -> Inputs:
    """Tokens, of which the first four stand for the patches of an image."""
    words = torch.randint(3, IMAGE, (ROWS, LENGTH), generator=generator)
    tokens = torch.cat([torch.full((ROWS, 4), IMAGE), words], dim=1)
    return {**pixels(generator), "input_ids": tokens, "labels": tokens}


def points(generator: Generator) -> Inputs:
    """Pixels, and a point in each."""
    return {
        **pixels(generator, 16),
        "input_points": torch.rand(ROWS, 1, 1, 2, generator=generator) * 16,
        "input_labels": torch.ones(ROWS, 1, 1, dtype=torch.long),
    }


def spectrum(generator: Generator) -> Inputs:
    """Sound as frequencies in, tokens out."""
    return {
        "input_features": torch.randn(ROWS, 4, 2 * LENGTH, generator=generator),
        "labels": draw_tokens(generator, LENGTH // 2),
    }


def wave(generator: Generator) -> Inputs:
    """Sound in, letters out."""
    return {
        "input_values": torch.randn(ROWS, 320, generator=generator),
        "labels": torch.randint(1, VOCABULARY, (ROWS, 2), generator=generator),
    }
