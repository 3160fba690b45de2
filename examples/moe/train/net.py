"""The model: a byte-level decoder with a mixture of experts in every layer.

Read beside examples/moe/model (Go): the same steps on the same stored tensors.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

CONFIG = dict(vocab=256, hidden=128, layers=4, heads=4, experts=16, top_k=2,
              ffn=192, context=512, rope_base=10000, eps=1e-6)


def rms(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class MoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        H, E, Fd = c["hidden"], c["experts"], c["ffn"]
        self.k = c["top_k"]
        self.router = nn.Parameter(torch.randn(E, H) * 0.02)
        self.up = nn.Parameter(torch.randn(E, Fd, H) * H**-0.5)
        self.down = nn.Parameter(torch.randn(E, H, Fd) * 0.2 * Fd**-0.5)

    def forward(self, x):  # x [N, H], already normed; returns y [N, H], aux loss
        E = self.router.shape[0]
        probs = F.softmax(F.linear(x.float(), self.router), dim=-1)
        p, idx = probs.topk(self.k, dim=-1)
        w = p / p.sum(-1, keepdim=True)
        flat = idx.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=E)
        rows = x[order // self.k].split(counts.tolist())
        ups, downs = self.up.unbind(0), self.down.unbind(0)
        ys = [F.linear(F.relu(F.linear(r, ups[e])).square(), downs[e]) for e, r in enumerate(rows)]
        y = torch.cat(ys)[torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))]
        y = (y.view(x.shape[0], self.k, -1) * w.unsqueeze(-1)).sum(1)
        aux = E * (counts / counts.sum() * probs.mean(0)).sum()
        return y, aux


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        H = c["hidden"]
        self.heads, self.eps = c["heads"], c["eps"]
        self.attn_norm = nn.Parameter(torch.ones(H))
        self.ffn_norm = nn.Parameter(torch.ones(H))
        self.q_norm = nn.Parameter(torch.ones(H // self.heads) * 1.5)
        self.k_norm = nn.Parameter(torch.ones(H // self.heads) * 1.5)
        self.wq = nn.Parameter(torch.randn(H, H) * H**-0.5)
        self.wk = nn.Parameter(torch.randn(H, H) * H**-0.5)
        self.wv = nn.Parameter(torch.randn(H, H) * H**-0.5)
        self.wo = nn.Parameter(torch.randn(H, H) * 0.2 * H**-0.5)
        self.moe = MoE(c)

    def forward(self, x, cos, sin):  # x [B, T, H]
        B, T, H = x.shape
        n = rms(x, self.eps) * self.attn_norm
        q, k, v = F.linear(n, torch.cat([self.wq, self.wk, self.wv])).view(B, T, 3, self.heads, -1).unbind(2)
        q = rope(rms(q, self.eps) * self.q_norm, cos, sin).transpose(1, 2)
        k = rope(rms(k, self.eps) * self.k_norm, cos, sin).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        x = x + F.linear(a.transpose(1, 2).reshape(B, T, H), self.wo)
        y, aux = self.moe((rms(x, self.eps) * self.ffn_norm).view(B * T, H))
        return x + y.view(B, T, H), aux


def rope(x, cos, sin):  # x [B, T, heads, D]: pairs (i, i + D/2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Net(nn.Module):
    def __init__(self, c=CONFIG):
        super().__init__()
        self.c = c
        self.embed = nn.Parameter(torch.randn(c["vocab"], c["hidden"]))
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["layers"]))
        self.norm = nn.Parameter(torch.ones(c["hidden"]))
        self.head = nn.Parameter(torch.zeros(c["vocab"], c["hidden"]))
        D = c["hidden"] // c["heads"]
        inv = float(c["rope_base"]) ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        ang = torch.arange(c["context"], dtype=torch.float64)[:, None] * inv
        self.register_buffer("cos", ang.cos().float()[:, None], persistent=False)
        self.register_buffer("sin", ang.sin().float()[:, None], persistent=False)

    def forward(self, tokens):  # tokens [B, T] -> logits [B, T, vocab], aux loss
        T = tokens.shape[1]
        x = self.embed[tokens]
        aux = 0.0
        for layer in self.layers:
            x, a = layer(x, self.cos[:T], self.sin[:T])
            aux = aux + a
        return F.linear(rms(x, self.c["eps"]) * self.norm, self.head), aux / len(self.layers)


def to_tensors(net, dtype=torch.float16):
    """The stored form: every matrix [out, in], every expert its own tensors."""
    out = {"embed": net.embed, "norm": net.norm, "head": net.head}
    for i, l in enumerate(net.layers):
        for n in ("attn_norm", "ffn_norm", "q_norm", "k_norm", "wq", "wk", "wv", "wo"):
            out[f"layers.{i}.{n}"] = getattr(l, n)
        out[f"layers.{i}.router"] = l.moe.router
        for e in range(l.moe.router.shape[0]):
            out[f"layers.{i}.experts.{e}.up"] = l.moe.up[e]
            out[f"layers.{i}.experts.{e}.down"] = l.moe.down[e]
    return {k: v.detach().to(dtype).contiguous() for k, v in out.items()}


def from_tensors(t, c=CONFIG):
    """A Net in f32 holding exactly the stored values."""
    net = Net(c)
    with torch.no_grad():
        for n in ("embed", "norm", "head"):
            getattr(net, n).copy_(t[n].float())
        for i, l in enumerate(net.layers):
            for n in ("attn_norm", "ffn_norm", "q_norm", "k_norm", "wq", "wk", "wv", "wo"):
                getattr(l, n).copy_(t[f"layers.{i}.{n}"].float())
            l.moe.router.copy_(t[f"layers.{i}.router"].float())
            for e in range(c["experts"]):
                l.moe.up[e].copy_(t[f"layers.{i}.experts.{e}.up"].float())
                l.moe.down[e].copy_(t[f"layers.{i}.experts.{e}.down"].float())
    return net.eval()
