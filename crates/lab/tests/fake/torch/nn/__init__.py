import torch


class functional:
    @staticmethod
    def scaled_dot_product_attention(q, k, v, is_causal, scale, enable_gqa=False):
        return torch.attention(q, k, v, scale, 0 if is_causal else None)
