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
QWEN3_NEXT = "Qwen3-Next-80B-A3B"  # 48 layers, 3 of 4 gated delta rules: 16 heads of keys, 32 of values, K = V = 128
QWEN3_5 = "Qwen3.5-397B-A17B"  # 16 heads of keys, 64 of values
KIMI_LINEAR = "Kimi-Linear-48B-A3B"  # KDA, 32 heads, K = V = 128, softplus gate
KIMI_K3 = "Kimi-K3"  # KDA, 96 heads, K = V = 128, gate bound -5

MODELS = (MIXTRAL, DEEPSEEK_V3, QWEN3_30B, GPT_OSS_120B)
