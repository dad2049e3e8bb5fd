"""Layers of published models, as in their configuration files.

An expert layer has `G` experts of a hidden size K and an intermediate size N; a token goes to `top_k` of them. The
down projection is the same shape with K and N exchanged.
"""

from typing import NamedTuple


class Experts(NamedTuple):
    """One model's expert layer."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int


MIXTRAL = Experts("Mixtral-8x7B", 8, 2, 4096, 14336)
DEEPSEEK_V3 = Experts("DeepSeek-V3", 256, 8, 7168, 2048)
QWEN3_30B = Experts("Qwen3-30B-A3B", 128, 8, 2048, 768)
GPT_OSS_120B = Experts("gpt-oss-120b", 128, 4, 2880, 2880)  # 2880 is a multiple of neither 128 nor 512

RING_LINEAR = "Ring-mini-linear-2.0"  # 20 layers of 16 heads, K = V = 128, ALiBi's decay per head
GLA_1B = "GLA-1.3B"  # 4 heads, K = 256, V = 512, a decay per channel

MODELS = (MIXTRAL, DEEPSEEK_V3, QWEN3_30B, GPT_OSS_120B)
