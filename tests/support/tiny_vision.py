"""A Qwen2.5-VL of 100,000 weights, its processor without torchvision, and prompts with none, one or two images."""

from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import trustrl
from support.regions_oracle import support
from trustrl import PolicyTokens, RolloutTokens, TopK, regions
from trustrl.config.terms import TokenWeights
from trustrl.core.records import FullVocabulary

PATCH, MERGED = 4, 2
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = ["<pad>", "<eos>", "<unk>", START, END, IMAGE, VIDEO]
START_ID, END_ID, IMAGE_ID, VIDEO_ID = (SPECIAL.index(word) for word in (START, END, IMAGE, VIDEO))
VOCABULARY, K = 112, 12
SIDES = [(16, 16), (24, 16), (16, 32), (32, 24)]
TEMPLATE = (
    "{% for turn in messages %}{% if turn.content is string %}{{ turn.content }}{% else %}{% for part in turn.content %}"
    "{% if part.type == 'image' %}"
    + START
    + IMAGE
    + END
    + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}:"
)


def _tight(divergence: Any, **more: Any) -> regions.Region:
    return regions.DPPO(divergence(max_increase=0.02, max_decrease=0.02, **more), anchor="proximal")


REGIONS = {
    "binary": _tight(regions.BinaryTV),
    "top-K": _tight(regions.TopKTV, k=K),
    "TROLL": trustrl.preset("troll", k=K, bound=0.01),
    "exact TV": _tight(regions.FullTV),
}


def model(seed: int = 0) -> Any:
    """Random weights; ten times the usual width, so that log-probs differ as much as a trained model's."""
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 48,
        "patch_size": PATCH, "spatial_merge_size": MERGED, "temporal_patch_size": 2, "window_size": 16,
        "fullatt_block_indexes": [1], "in_channels": 3, "initializer_range": 0.25,
    }  # fmt: skip
    ids = {
        "vision_start_token_id": START_ID, "vision_end_token_id": END_ID, "image_token_id": IMAGE_ID,
        "video_token_id": VIDEO_ID,
    }  # fmt: skip
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and one for each mark of an image."""
    words = [*SPECIAL, *map(chr, range(32, 127))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left",
        chat_template=TEMPLATE,
    )  # fmt: skip


def processor() -> Any:
    """transformers' own, with Pillow. Its part for videos needs torchvision and is left out."""
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class ImagesOnly(Qwen2_5_VLProcessor):
        def __call__(self, images: Any = None, **more: Any) -> Any:
            # TRL passes None for a row without images among rows with images, which transformers 5.22 refuses.
            return super().__call__(images=None if images is None else [row or [] for row in images], **more)

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    limits = {"shortest_edge": 64, "longest_edge": 4096}
    images = Qwen2VLImageProcessorPil(patch_size=PATCH, temporal_patch_size=2, merge_size=MERGED, size=limits)
    return ImagesOnly(image_processor=images, tokenizer=tokenizer(), video_processor=None, chat_template=TEMPLATE)


def prompts(counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Rows of a dataset, with so many images each, of four sizes."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    rows = []
    for row, count in enumerate(counts):
        sides = [SIDES[(row + number) % 4] for number in range(count)]
        images = [Image.fromarray(draw.integers(0, 255, (*side, 3), dtype=np.uint8)) for side in sides]
        rows.append({"prompt": [{"role": "user", "content": "what" + "abc"[: row % 3]}], "images": images})
    return rows


def loss(
    before: Tensor, now: Tensor, tokens: Tensor, in_loss: Tensor, advantages: Tensor, weights: Tensor, region: Any
) -> Any:
    """The region's loss from both whole distributions, (B, T, V), with a factor on each token."""
    needs = region.needs()
    policy: dict[str, Any] = {"logp": now.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)}
    rollout: dict[str, Any] = {}
    if needs.topk:
        ids = before.topk(needs.topk, -1).indices
        values, tail = support(before, ids, tokens)
        rollout["topk"] = TopK(ids, values, of=needs.anchor, tail_logp=tail)
        policy["topk_logp"], policy["tail_logp"] = support(now, ids, tokens)
    if needs.full:
        policy["full_logp"], rollout["full"] = now, FullVocabulary(before, of=needs.anchor)
    proximal = before.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    rollout |= {"advantage": advantages, "in_loss": in_loss, "token_ids": tokens, "proximal_logp": proximal}
    reduction = TokenWeights(weights)
    return trustrl.policy_loss(PolicyTokens(**policy), RolloutTokens(**rollout), region, reduction=reduction)


class Row(NamedTuple):
    """A sequence with its images, as verl carries them."""

    prompt: Tensor
    response: Tensor
    pixels: Tensor | None
    """(patches, numbers of a patch); None without images."""

    grid: Tensor | None
    """(images, 3): patches over time, height and width."""

    @property
    def ids(self) -> Tensor:
        return torch.cat([self.prompt, self.response])

    def passed(self) -> dict[str, Tensor]:
        """The model's arguments for the images."""
        return {} if self.pixels is None else {"pixel_values": self.pixels, "image_grid_thw": self.grid}

    def positions(self, network: Any) -> Tensor:
        """(4, tokens): of the text, then over time, height and width, as verl computes them."""
        text = torch.arange(len(self.ids))
        if self.grid is None:
            return text.expand(4, -1)
        kinds = (self.ids == IMAGE_ID).long().unsqueeze(0)
        where, _ = network.model.get_rope_index(self.ids.unsqueeze(0), kinds, image_grid_thw=self.grid)
        return torch.cat([text.unsqueeze(0), where[:, 0]])


COUNTS = (1, 0, 2, 0, 0, 1)
"""Images of each row. Each micro-batch of two or three rows has some: verl 0.9.1 fails on one that has none."""

ADVANTAGES = torch.tensor([1.0, -0.5, 0.7, -1.2, 0.3, -0.9])
LONGEST = 8


def rows() -> list[Row]:
    """Ragged sequences with images of four sizes."""
    draw = torch.Generator().manual_seed(5)
    made = []
    for number, count in enumerate(COUNTS):
        grids = [(1, *(side // PATCH for side in SIDES[(number + more) % 4])) for more in range(count)]
        marks = [id for _, h, w in grids for id in (START_ID, *[IMAGE_ID] * (h * w // MERGED**2), END_ID)]
        prompt = torch.tensor([20 + number, *marks, 30, 31])
        response = torch.randint(10, 100, (LONGEST - number % 3,), generator=draw)
        patches = torch.randn(sum(h * w for _, h, w in grids), 3 * 2 * PATCH**2, generator=draw)
        images = (patches, torch.tensor(grids)) if count else (None, None)
        made.append(Row(prompt, response, *images))
    return made


def distribution(network: Any, sequences: list[Row], temperature: float) -> Tensor:
    """(B, R, V) log-probs of the responses, each sequence by itself, padded on the right."""
    found = []
    for row in sequences:
        logits = network(
            input_ids=row.ids.unsqueeze(0), position_ids=row.positions(network).unsqueeze(1), **row.passed()
        )
        logp = (logits.logits[0, len(row.prompt) - 1 : -1] / temperature).log_softmax(-1)
        found.append(torch.nn.functional.pad(logp, (0, 0, 0, LONGEST - len(row.response))))
    return torch.stack(found)
