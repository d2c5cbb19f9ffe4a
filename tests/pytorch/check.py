"""Independent referee: recompute one dumped step with PyTorch in fp32 and compare the loss and every gradient.

usage: check.py DIR [DIR ...]      (DIR as written by `mbperf ... --dump DIR`)

Needs torch alone. Written against PyTorch's own modules: F.rms_norm, F.linear, scaled_dot_product_attention,
F.silu, F.cross_entropy and autograd; shares no code with mbperf. Weights are the dumped ones (bf16 values).
Exit 0 when every directory agrees, 1 when one does not, 2 when one is no dump.
"""
import json, math, os, struct, sys

FILES = ["config.json", "weights.safetensors", "grads.safetensors", "step.safetensors"]


def dumps(words):
    """The directories of the command line; looked at before PyTorch is loaded and before any of them is computed."""
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__.strip())
        sys.exit(0)
    lacking = [os.path.join(d, f) for d in words for f in FILES if not os.path.isfile(os.path.join(d, f))]
    if lacking or not words:
        print(f"check.py: no file {lacking[0]}: `mbperf ... --dump DIR` writes it" if lacking else
              "usage: check.py DIR [DIR ...]      (DIR as written by `mbperf ... --dump DIR`)", file=sys.stderr)
        sys.exit(2)
    return words


if __name__ == "__main__":
    asked = dumps(sys.argv[1:])
import torch, torch.nn.functional as F

# bf16 keeps 8 bits: each stored intermediate is off by up to 2^-9, and a gradient passes through a few
# dozen of them; independent errors add up in the norm, so 2^-9 * sqrt(100) bounds what rounding explains.
GRADIENT_TOLERANCE = 2**-9 * 10
LOSS_TOLERANCE = 2**-9
# Deep and recurrent models have more intermediates, and some of their gradients are ill-conditioned. Where a gradient is
# beyond the bound, the same step is run by PyTorch once more, storing what mbperf stores in bf16 (outputs of products,
# norms, activations, attention and layers, and their gradients). What that alone changes, twice, since the two round in
# different places, is explained by rounding too; what is beyond both is not.
ROUNDINGS = 2
# Rounding of one step is one draw: a gradient of four numbers came 0.3 % off by one and 0.8 to 4 % by seven others. So where a
# gradient seems to be beyond, all of that step are judged by the root mean square of as many draws as this. Each has a
# grid of its own: a tensor is rounded after it was multiplied by a number between 1 and 2, and divided by it.
DRAWS = 8


class Grid:
    """What is multiplied by before rounding: 1 is bf16 as it is stored."""

    factor = 1.0


def stored(x):
    return (x * Grid.factor).bfloat16().float() / Grid.factor


class Stored(torch.autograd.Function):
    """A tensor that was stored in bf16, and its gradient."""

    @staticmethod
    def forward(ctx, x):
        return stored(x)

    @staticmethod
    def backward(ctx, g):
        return stored(g)


class StoredAttention(torch.autograd.Function):
    """Attention whose output was stored in bf16, and whose backward pass takes do . o from what was stored, as fused kernels
    do: where a softmax is nearly even that difference matters."""

    @staticmethod
    def forward(ctx, q, k, v, seen, scale):
        scores = q @ k.transpose(-2, -1) * scale
        p = torch.softmax(scores if seen is None else scores.masked_fill(~seen, -math.inf), -1)
        o = stored(p @ v)
        ctx.save_for_backward(q, k, v, p, o)
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx, g):
        q, k, v, p, o = ctx.saved_tensors
        g = stored(g)
        ds = p * (g @ v.transpose(-2, -1) - (g * o).sum(-1, keepdim=True)) * ctx.scale
        return stored(ds @ k), stored(ds.transpose(-2, -1) @ q), stored(p.transpose(-2, -1) @ g), None, None


def stored_attention(q, k, v, attn_mask=None, is_causal=False, scale=None):
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril() if is_causal else attn_mask
    return StoredAttention.apply(q, k, v, seen, scale or q.shape[-1] ** -0.5)


def gradients_of_storage(cfg, w, step, draw=0):
    """Gradients of the step when PyTorch stores in bf16 what mbperf does."""
    Grid.factor = 2 ** (draw / DRAWS)
    w = {k: v.detach().clone().requires_grad_() for k, v in w.items()}
    places = [(F, n) for n in ("linear", "rms_norm", "layer_norm", "silu", "gelu", "conv1d", "scaled_dot_product_attention")]
    places += [(Step, n) for n in ("attention", "latent_attention", "shared_kv_attention", "delta_net", "mamba", "mlp", "moe")]
    places += [(Step, n) for n in ("block", "merger", "video_block", "modulated", "one_stream", "back_into_streams")]
    kept = [getattr(*place) for place in places]
    try:
        for (owner, name), f in zip(places, kept):
            own = stored_attention if name == "scaled_dot_product_attention" else None
            setattr(owner, name, own or (lambda *a, f=f, **k: Stored.apply(f(*a, **k))))
        Step(cfg, w, step).run()
    finally:
        for (owner, name), f in zip(places, kept):
            setattr(owner, name, f)
    return {k: v.grad for k, v in w.items()}


def load(path):
    with open(path, "rb") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        head = json.loads(f.read(n))
        body = f.read()
    out = {}
    for name, t in head.items():
        if name == "__metadata__":
            continue
        a, b = t["data_offsets"]
        out[name] = torch.frombuffer(bytearray(body[a:b]), dtype=torch.float32).reshape(t["shape"]).clone()
    return out


def temperature(scaling, weight):
    """YaRN: 0.1 w ln(factor) + 1."""
    return 0.1 * weight * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0


def angles(positions, m, rotary):
    """cos and sin [1, s, 1, rotary / 2] by the model's frequencies."""
    base, scaling = m["rotary_base"], m["rope_scaling"]
    inv = base ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    size = 1.0
    if scaling and scaling["type"] == "llama3":
        turns = scaling["original_max_position"] * inv / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        inv = inv * (kept + (1 - kept) / scaling["factor"])
    elif scaling and scaling["type"] == "yarn":
        pair = lambda turns: rotary * math.log(scaling["original_max_position"] / (turns * 2 * math.pi)) / (2 * math.log(base))
        low, high = pair(scaling["beta_fast"]), pair(scaling["beta_slow"])
        if scaling["rounded"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary - 1)
        slowed = ((torch.arange(rotary // 2).double() - low) / max(high - low, 1e-3)).clamp(0, 1)
        inv = inv * (1 - slowed + slowed / scaling["factor"])
        size = temperature(scaling, scaling["mscale"]) / temperature(scaling, scaling["mscale_all_dim"])
    angle = positions.double()[:, None] * inv[None]
    return (size * angle.cos()).float()[None, :, None], (size * angle.sin()).float()[None, :, None]


def text_angles(s, m, rotary):
    """The same for a whole sequence, by interleaved M-RoPE where an image lies in it."""
    v, section = m.get("vision"), m.get("mrope_section")
    if not v or not section:
        return angles(torch.arange(s), m, rotary)
    side, start = v["side"] // 2, v["start"]
    grid = torch.arange(side)
    image = torch.stack([torch.zeros(side, side).long(), grid[:, None].expand(side, side), grid[None].expand(side, side)])
    before, after = torch.arange(start), torch.arange(s - start - side * side) + start + side
    places = torch.cat([before.expand(3, -1), image.reshape(3, -1) + start, after.expand(3, -1)], 1)
    pairs = rotary // 2
    by_axis = torch.zeros(pairs).long()
    by_axis[1 : 3 * section[1] : 3], by_axis[2 : 3 * section[2] : 3] = 1, 2
    inv = m["rotary_base"] ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = places[by_axis].T.double() * inv
    return angle.cos().float()[None, :, None], angle.sin().float()[None, :, None]


def rope(x, turns, rotary):
    """x [b, s, heads, d]; rotate-half on the first `rotary` elements, by cos and sin."""
    c, s = turns
    a, b, rest = x[..., : rotary // 2], x[..., rotary // 2 : rotary], x[..., rotary:]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)


def video_grid(s):
    """Frames, rows, columns of a video of s patches: frames of 52 x 30, or factors near one another."""
    if s % (52 * 30) == 0:
        return s // (52 * 30), 52, 30
    factor = lambda n: next(f for f in range(math.isqrt(n), 0, -1) if n % f == 0)
    width = factor(s)
    height = factor(s // width)
    return s // width // height, height, width


class Step:
    def __init__(self, cfg, w, step):
        self.cfg, self.w, self.step = cfg, w, step
        self.m = cfg["model"]
        self.aux = torch.zeros(())
        self.rows = {}  # of each bias: what was added to rows
        self.sites = {}  # of each place of hyper-connections: what its maps were made of and applied to

    def norm(self, x, name):
        w = self.w[name].reshape(-1)
        return F.rms_norm(x, (x.shape[-1],), w + 1 if self.m["zero_centered_norms"] else w, self.m["layernorm_epsilon"])

    def latent_attention(self, i, x):
        """Multi-latent attention: low-rank q and kv, one rotated key part (neighbours pair up) for all heads."""
        m, p, a = self.m, f"layer{i}.attn.", self.m["mla"]
        heads, nope, rot, dv = m["num_attention_heads"], a["qk_head_dim"], a["qk_pos_emb_head_dim"], a["v_head_dim"]
        b, s, _ = x.shape
        w = lambda what: self.w[p + what + ".weight"]
        latent = lambda t, what: self.norm(t, p + what + ".weight") if m["qk_layernorm"] else t
        y = self.norm(x, p + "norm.weight")
        if a["q_lora_rank"]:
            q = F.linear(latent(F.linear(y, w("q_down")), "q_norm"), w("q_up"))
        else:
            q = F.linear(y, w("q"))
        q_nope, q_rope = q.view(b, s, heads, nope + rot).split([nope, rot], -1)
        kv, k_rope = F.linear(y, w("kv_down")).split([a["kv_lora_rank"], rot], -1)
        k_nope, v = F.linear(latent(kv, "kv_norm"), w("kv_up")).view(b, s, heads, nope + dv).split([nope, dv], -1)
        c, sn = angles(torch.arange(s), m, rot)
        turn = lambda t: torch.cat([t[..., ::2] * c - t[..., 1::2] * sn, t[..., 1::2] * c + t[..., ::2] * sn], -1)
        q = torch.cat([q_nope, turn(q_rope)], -1)
        k = torch.cat([k_nope, turn(k_rope[:, :, None]).expand(-1, -1, heads, -1)], -1)
        scale = (nope + rot) ** -0.5
        if m["rope_scaling"] and m["rope_scaling"]["type"] == "yarn":
            scale *= temperature(m["rope_scaling"], m["rope_scaling"]["mscale_all_dim"]) ** 2
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, scale=scale)
        return x + F.linear(o.transpose(1, 2).reshape(b, s, heads * dv), w("proj"))

    def add(self, x, out):
        """The residual; hyper-connections add it themselves."""
        return out if self.m.get("hyper_connections") else x + out

    def shared_kv_attention(self, i, x):
        """DeepSeek-V4: one key head, which is the value too; rotations as complex factors, of the output back again."""
        m, p, a = self.m, f"layer{i}.attn.", self.m["shared_kv"]
        heads, d, rot, eps = m["num_attention_heads"], m["kv_channels"], a["rotary"], m["layernorm_epsilon"]
        b, s, _ = x.shape
        w = lambda what: self.w[p + what + ".weight"]
        compressed = a["compress_ratios"][i] > 0
        frequencies = dict(m, rotary_base=a["compress_rotary_base"]) if compressed else dict(m, rope_scaling=None)
        c, sn = (t.squeeze(2)[0] for t in angles(torch.arange(s), frequencies, rot))
        size = (c.square() + sn.square()).sqrt()  # YaRN's amplitude is left out
        factor = torch.complex(c / size, sn / size)[None, :, None]

        def turned(t, factor):
            plain, part = t.split([d - rot, rot], -1)
            pairs = torch.view_as_complex(part.reshape(*part.shape[:-1], rot // 2, 2).contiguous())
            return torch.cat([plain, torch.view_as_real(pairs * factor).flatten(-2)], -1)

        y = self.norm(x, p + "norm.weight")
        q = F.linear(self.norm(F.linear(y, w("q_down")), p + "q_norm.weight"), w("q_up")).view(b, s, heads, d)
        q = turned(F.rms_norm(q, (d,), None, eps), factor)
        key = turned(self.norm(F.linear(y, w("kv")), p + "kv_norm.weight")[:, :, None], factor)
        back = torch.arange(s)[:, None] - torch.arange(s)[None]
        seen = (back >= 0) & (compressed | (back < a["window"]))
        scores = (torch.einsum("bihd,bjd->bhij", q, key[:, :, 0]) / math.sqrt(d)).masked_fill(~seen, -math.inf)
        sink = self.w[p + "sinks"].view(1, heads, 1, 1).expand(b, heads, s, 1)
        o = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1] @ key[:, None, :, 0]
        o = turned(o.transpose(1, 2), factor.conj()).reshape(b, s, a["o_groups"], -1)
        o = torch.einsum("bsgd,grd->bsgr", o, w("group_proj").view(a["o_groups"], a["o_lora_rank"], -1))
        return self.add(x, F.linear(o.flatten(2), w("proj")))

    def maps(self, x, p, head):
        """The logits before scale and base, pre, and of a sublayer post and res, of the streams x [b, s, n, h]."""
        n, eps = x.shape[2], 1e-6
        flat = x.flatten(2)
        w = lambda what: self.w[p + what + ".weight"]
        flat = F.rms_norm(flat, (flat.shape[-1],), None, self.m["layernorm_epsilon"])
        logits, scale, base = flat @ w("proj").view(-1, flat.shape[-1]).t(), w("scale").view(-1), w("base").view(-1)
        part = lambda i, a, z: logits[..., a:z] * scale[i] + base[a:z]
        pre = torch.sigmoid(part(0, 0, n)) + eps
        if head:
            return logits, pre, None, None
        m = torch.softmax(part(2, 2 * n, n * (n + 2)).unflatten(-1, (n, n)), -1) + eps
        m = m / (m.sum(-2, keepdim=True) + eps)
        for _ in range(self.m["hyper_connections"]["sinkhorn_iterations"] - 1):
            m = m / (m.sum(-1, keepdim=True) + eps)
            m = m / (m.sum(-2, keepdim=True) + eps)
        return logits, pre, 2 * torch.sigmoid(part(1, n, 2 * n)), m

    def one_stream(self, x, pre):
        return torch.einsum("bsn,bsnh->bsh", pre, x)

    def back_into_streams(self, x, post, res, out):
        return torch.einsum("bsij,bsih->bsjh", res, x) + post[..., None] * out[:, :, None]

    def head_stream(self, x, p):
        """One stream before a last norm."""
        if not self.m.get("hyper_connections"):
            return x
        p += "hyper_head."
        logits, pre, _, _ = self.maps(x, p, True)
        y = self.one_stream(x, pre)
        y.retain_grad()
        self.sites[p] = (x, y, None, None, logits, pre, None, None)
        return y

    def around(self, i, what, sublayer, x):
        """A sublayer, with hyper-connections around it where the model has them."""
        if not self.m.get("hyper_connections"):
            return sublayer(x)
        p = f"layer{i}.{what}.hyper."
        logits, pre, post, res = self.maps(x, p, False)
        y = self.one_stream(x, pre)
        y.retain_grad()
        out = sublayer(y)
        after = self.back_into_streams(x, post, res, out)
        after.retain_grad()
        self.sites[p] = (x, y, out, after, logits, pre, post, res)
        return after

    def hyper_sizes(self):
        """Size of what is summed in each gradient of hyper-connections. A map's gradient is the dot of a gradient with a
        stream, and streams that are alike, a norm behind, and Sinkhorn-Knopp make such dots cancel: 2^-9 of the
        factors' lengths is left by rounding, whatever the dot is."""
        sizes, length = {}, lambda t: t.norm(dim=-1)
        for p, site in self.sites.items():
            x, y, out, after, logits, pre, post, res = (t if t is None else t.detach() for t in site)
            n = x.shape[2]
            s = length(site[1].grad)[..., None] * length(x) * pre * (1 - pre).abs()
            if out is not None:
                d = length(site[3].grad)
                of_post = d * length(out)[..., None] * post * (1 - post / 2)
                of_res = length(x)[..., :, None] * d[..., None, :] * res
                s = torch.cat([s, of_post, of_res.flatten(-2)], -1)
            k = s.shape[-1]
            scale = self.w[p + "scale.weight"].detach().view(-1)[(torch.arange(k) // n).clamp(max=2)]
            sizes[p + "base.weight"] = s.norm().item()
            sizes[p + "scale.weight"] = (s * logits[..., :k]).norm().item()
            # A normed row is as long as the root of its elements' number.
            sizes[p + "proj.weight"] = (s * scale).norm().item() * math.sqrt(n * x.shape[3])
        return sizes

    def attention(self, i, x):
        if self.m.get("shared_kv"):
            return self.shared_kv_attention(i, x)
        if self.m.get("mla"):
            return self.latent_attention(i, x)
        m, p = self.m, f"layer{i}.attn."
        nq, nkv, d = m["num_attention_heads"], m["num_query_groups"], m["kv_channels"]
        b, s, _ = x.shape
        y = self.linear(self.norm(x, p + "norm.weight"), p + "qkv")
        gated = m["attention_output_gate"]
        q, k, v, *gate = y.split([nq * d, nkv * d, nkv * d] + [nq * d] * gated, -1)
        q, k, v = q.view(b, s, nq, d), k.view(b, s, nkv, d), v.view(b, s, nkv, d)
        if m["qk_layernorm"]:
            q, k = self.norm(q, p + "q_norm.weight"), self.norm(k, p + "k_norm.weight")
        rot = int(d * m["rotary_percent"])
        turns = text_angles(s, m, rot)
        q, k = rope(q, turns, rot), rope(k, turns, rot)
        k, v = (t.repeat_interleave(nq // nkv, 2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = self.seen(i, s)
        if m.get("attention_sinks"):  # one more column of logits, whose probability goes nowhere
            scores = (q @ k.transpose(2, 3) / math.sqrt(d)).masked_fill(~seen, -math.inf)
            sink = self.w[p + "sinks"].view(1, nq, 1, 1).expand(b, nq, s, 1)
            o = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1] @ v
        else:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        o = o.transpose(1, 2).reshape(b, s, nq * d)
        if gated:
            o = o * torch.sigmoid(gate[0])
        return x + self.linear(o, p + "proj")

    def linear(self, x, name):
        return self.biased(F.linear(x, self.w[name + ".weight"]), name)

    def biased(self, y, name, n=0, of=1, factor=1.0):
        """y [..., c] plus bias n of the `of` in that layer, times `factor`; each row's own gradient is kept."""
        bias = self.w.get(name + ".bias")
        if bias is None:
            return y
        rows = bias.view(of, -1)[n].expand_as(y)
        rows.retain_grad()
        self.rows.setdefault(name + ".bias", []).append(rows)
        return y + rows * factor

    def seen(self, i, s):
        """Which keys each query of layer i sees [s, s]: those up to its own, with a window the last ones of them."""
        back = torch.arange(s)[:, None] - torch.arange(s)[None]
        window, m = self.m.get("window"), back >= 0
        if window and not (window["skip_freq"] and (i + 1) % window["skip_freq"] == 0):
            m = m & (back < window["keys"])
        return m

    def activation(self, a):
        if self.m["activation"] == "quick_geglu":
            gate, up = a.chunk(2, -1)
            limit = self.m["activation_clamp"]
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(1.702 * gate) * (up + self.m["glu_linear_offset"])
        if self.m["activation"] == "swiglu_clamped":
            gate, up = a.chunk(2, -1)
            limit = self.m["activation_clamp"]
            return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        if self.m["activation"] == "squared_relu":
            return F.relu(a).square()
        gate, up = a.chunk(2, -1)
        return F.silu(gate) * up

    def gated(self, y, p):
        return self.linear(self.activation(self.linear(y, p + "fc1")), p + "fc2")

    def mamba(self, i, x):
        """Mamba-2, token by token: h = exp(dt A) h + dt x B^T, y = h C + D x."""
        e, p = self.m["mamba"], f"layer{i}.mamba."
        nh, d, n, g = e["num_heads"], e["head_dim"], e["state_dim"], e["num_groups"]
        b, s, _ = x.shape
        inner, mats = nh * d, g * n
        w = lambda what: self.w[p + what]
        z, xbc, dt = F.linear(self.norm(x, p + "norm.weight"), w("in_proj.weight")).split([inner, inner + 2 * mats, nh], -1)
        taps = w("conv.weight").shape[-1]
        xbc = F.conv1d(F.pad(xbc.transpose(1, 2), (taps - 1, 0)), w("conv.weight")[:, None], w("conv.bias").view(-1), groups=inner + 2 * mats)
        xs, B, C = F.silu(xbc.transpose(1, 2)).split([inner, mats, mats], -1)
        xs = xs.view(b, s, nh, d)
        B, C = (t.view(b, s, g, n).repeat_interleave(nh // g, 2) for t in (B, C))
        dt, A = F.softplus(dt + w("dt_bias").view(-1)), -w("a_log").view(-1).exp()
        h, ys = torch.zeros(b, nh, d, n), []
        for t in range(s):
            h = h * (dt[:, t] * A).exp()[..., None, None] + (dt[:, t, :, None] * xs[:, t])[..., None] * B[:, t, :, None]
            ys.append((h * C[:, t, :, None]).sum(-1))
        y = torch.stack(ys, 1) + w("d").view(-1, 1) * xs
        y = (y.reshape(b, s, inner) * F.silu(z)).view(b, s, g, inner // g)
        y = F.rms_norm(y, (inner // g,), None, self.m["layernorm_epsilon"]).reshape(b, s, inner) * w("gated_norm.weight").view(-1)
        return x + F.linear(y, w("out_proj.weight"))

    def delta_net(self, i, x):
        """Gated delta net, token by token: S = exp(g) S, S += k (beta (v - S^T k))^T, o = S^T q."""
        e, p = self.m["delta_net"], f"layer{i}.delta."
        hk, hv, dk, dv = e["key_heads"], e["value_heads"], e["key_dim"], e["value_dim"]
        b, s, _ = x.shape
        w = lambda what: self.w[p + what]
        z, qkv, beta, alpha = F.linear(self.norm(x, p + "norm.weight"), w("in_proj.weight")).split([hv * dv, 2 * hk * dk + hv * dv, hv, hv], -1)
        taps = w("conv.weight").shape[-1]
        qkv = F.silu(F.conv1d(F.pad(qkv.transpose(1, 2), (taps - 1, 0)), w("conv.weight")[:, None], groups=qkv.shape[-1]).transpose(1, 2))
        q, k, v = qkv.split([hk * dk, hk * dk, hv * dv], -1)
        unit = lambda t: t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)
        q, k = (unit(t.reshape(b, s, hk, dk)).repeat_interleave(hv // hk, 2) for t in (q, k))
        q, v, beta = q / math.sqrt(dk), v.reshape(b, s, hv, dv), torch.sigmoid(beta)
        g = -w("a_log").view(-1).exp() * F.softplus(alpha + w("dt_bias").view(-1))
        state, out = torch.zeros(b, hv, dk, dv), []
        for t in range(s):
            state = state * g[:, t].exp()[..., None, None]
            held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - held))
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        y = self.norm(torch.stack(out, 1), p + "out_norm.weight") * F.silu(z.view(b, s, hv, dv))
        return x + F.linear(y.reshape(b, s, hv * dv), w("out_proj.weight"))

    def mlp(self, i, x):
        p = f"layer{i}.mlp."
        return x + self.gated(self.norm(x, p + "norm.weight"), p)

    def moe(self, i, local, x):
        m, e, p = self.m, self.m["moe"], f"layer{i}.moe."
        b, s, h = x.shape
        y = self.norm(x, p + "norm.weight").reshape(-1, h)
        experts, k = e["num_experts"], e["router_topk"]
        gate = self.linear(y, p + "router")
        scores = self.step[f"l{local}.moe.scores"]
        index = self.step[f"l{local}.moe.index"].long()
        forced = e["force_load_balancing"] or e["routing"] != "recipe"
        softplus = e["score_function"] == "sqrtsoftplus"
        sigmoid = softplus or e["score_function"] == "sigmoid"  # scores of each expert alone
        hashed = i < e.get("hash_layers", 0)
        if forced:  # the forced logits' values, the gate's gradient
            value = torch.logit(scores) if sigmoid else scores.log()
            if softplus:
                value = torch.expm1(scores.double().square()).log().float()
            logits = value + (gate - gate.detach())
        else:
            logits = gate
        one_by_one = lambda t: F.softplus(t).sqrt() if softplus else torch.sigmoid(t)
        s_all = one_by_one(logits) if sigmoid else torch.softmax(logits, -1)
        if sigmoid:
            probs = s_all.gather(1, index)
            if k > 1:
                probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
        elif e["pre_softmax"]:
            probs = s_all.gather(1, index)
        else:
            probs = torch.softmax(logits.gather(1, index), -1)
        if e["topk_scaling_factor"]:
            probs = probs * e["topk_scaling_factor"]
        if hashed:  # distinct experts, the same for all tokens of an id
            ids = self.step["ids.mb0"].long().view(-1)
            assert (index.sort(-1).values.diff(dim=-1) > 0).all(), "an expert was chosen twice"
            same = ids[:, None] == ids[None]
            assert ((index[:, None] == index[None]).all(-1) | ~same).all(), "experts are no function of the id"
        elif not forced:  # the dumped choice must be the top k of our own scores, but for ties within rounding
            groups, chosen = e["num_groups"], e["group_topk"]
            if groups > 1:  # the expert bias is still zero: groups by the sum of their best scores
                grouped = s_all.view(-1, groups, experts // groups)
                best = grouped.topk(k // chosen, -1).values.sum(-1)
                of_choice = best.gather(1, (index // (experts // groups)))
                assert (of_choice >= best.topk(chosen, -1).values[:, -1:] - 1e-2).all(), "a worse group was chosen"
                used = torch.zeros(best.shape).scatter_(1, index // (experts // groups), 1.0)
                assert (used.sum(-1) <= chosen).all(), "too many groups were chosen"
                # The best experts of the groups that the dump used, filled up with the next best groups.
                ranked = (best + 10 * used).topk(chosen, -1).indices
                mask = torch.zeros(best.shape).scatter_(1, ranked, 1.0)[..., None].expand(grouped.shape)
                mine = s_all.masked_fill(mask.reshape(s_all.shape) == 0, -1.0).topk(k, -1).values.sort(-1).values
            else:
                mine = s_all.topk(k, -1).values.sort(-1).values
            theirs = s_all.gather(1, index).sort(-1).values
            assert (mine - theirs).abs().max() < 1e-2, "the dumped choice is not the top k"
        tokens = y.shape[0]
        counts = torch.zeros(experts).index_add_(0, index.reshape(-1), torch.ones(index.numel()))
        norm_scores = s_all / s_all.sum(-1, keepdim=True) if sigmoid else s_all
        if e["load_balancing_type"] in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
            self.aux = self.aux + e["aux_loss_coeff"] * experts / (k * tokens * tokens) * (counts * norm_scores.sum(0)).sum()
        w1, w2 = self.w[p + "experts.fc1.weight"], self.w[p + "experts.fc2.weight"]
        # Latent experts work on a narrower projection of the tokens.
        width = e["latent_size"] or h
        given = F.linear(y, self.w[p + "latent_down.weight"]) if e["latent_size"] else y
        n_local = w2.shape[0] // width
        w1, w2 = w1.view(n_local, -1, width), w2.view(n_local, width, -1)
        local_id = index % n_local
        bins = experts if e["dispatcher"] == "alltoall" and self.cfg["parallel"]["ep"] > 1 else n_local
        keep = torch.ones_like(index, dtype=torch.bool)
        if e["capacity_factor"]:
            cap = math.ceil(tokens * k / bins * e["capacity_factor"])
            # Which rows are kept at the edge of the capacity hangs on the last bit of a probability: the dumped
            # choice is taken, after checking that it is the right one but for ties within rounding.
            keep = (self.step[f"l{local}.moe.dest"] >= 0).view_as(index)
            p_flat = probs.detach()
            for n in range(bins):
                here = (index % bins) == n
                kept, dropped = p_flat[here & keep], p_flat[here & ~keep]
                assert kept.numel() == min(cap, int(here.sum())), "a bin is not filled to its capacity"
                if dropped.numel() and kept.numel():
                    assert dropped.max() <= kept.min() + 1e-2, "a better row was dropped"
        out = torch.zeros_like(given)
        for n in range(n_local):
            for j in range(k):
                at = ((local_id[:, j] == n) & keep[:, j]).nonzero().reshape(-1)
                if at.numel():
                    prob = probs[at, j][:, None]
                    act = self.activation(self.biased(F.linear(given[at], w1[n]), p + "experts.fc1", n, n_local))
                    rows = F.linear(act * prob, w2[n])
                    out = out.index_add(0, at, self.biased(rows, p + "experts.fc2", n, n_local, prob))
        if e["latent_size"]:
            out = F.linear(out, self.w[p + "latent_up.weight"])
        if e["shared_expert_intermediate_size"]:
            shared = self.gated(y, p + "shared.")
            gate = self.w.get(p + "shared.gate.weight")
            out = out + (shared if gate is None else torch.sigmoid(F.linear(y, gate.view(1, -1))) * shared)
        return self.add(x, out.view_as(x))

    def layer_norm(self, x, name):
        return self.biased(F.layer_norm(x, (x.shape[-1],), self.w[name + ".weight"].view(-1), eps=1e-6), name)

    def block(self, i, x, side):
        """One block of the image tower; x [images, patches, h], patches row by row."""
        v, p = self.m["vision"], f"vision.block{i}."
        n, (images, patches, h) = v["num_heads"], x.shape
        d = h // n
        q, k, val = (t.view(images, patches, n, d) for t in self.linear(self.layer_norm(x, p + "norm1"), p + "qkv").chunk(3, -1))
        inv = 1e4 ** (-torch.arange(0, d // 2, 2, dtype=torch.float64) / (d // 2))
        at = torch.arange(patches)
        angle = torch.cat([(at // side)[:, None] * inv, (at % side)[:, None] * inv], 1)
        turns = angle.cos().float()[None, :, None], angle.sin().float()[None, :, None]
        q, k = rope(q, turns, d), rope(k, turns, d)
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, val)))
        x = x + self.linear(o.transpose(1, 2).reshape(images, patches, h), p + "proj")
        return x + self.linear(F.gelu(self.linear(self.layer_norm(x, p + "norm2"), p + "fc1"), approximate="tanh"), p + "fc2")

    def merger(self, name, x, side, normed_after):
        """Four neighbours of a square to one token."""
        images, _, h = x.shape
        x = x if normed_after else self.layer_norm(x, name + ".norm")
        x = x.view(images, side // 2, 2, side // 2, 2, h).permute(0, 1, 3, 2, 4, 5).reshape(images, -1, 4 * h)
        x = self.layer_norm(x, name + ".norm") if normed_after else x
        return self.linear(F.gelu(self.linear(x, name + ".fc1"), approximate="tanh"), name + ".fc2")

    def tower(self):
        """Merged tokens [images, tokens, hidden] and DeepStack's. The dumped patches come in squares of four; here they
        are put back row by row."""
        v, images = self.m["vision"], self.cfg["batch"]["micro_batch_size"]
        side, h = v["side"], v["hidden_size"]
        pixels = self.step["pixels.mb0"].view(images, side // 2, side // 2, 2, 2, -1)
        x = self.linear(pixels.permute(0, 1, 3, 2, 4, 5).reshape(images, side * side, -1), "vision.patch")
        table = self.w["vision.position.weight"].view(v["table_side"], v["table_side"], h).permute(2, 0, 1)[None]
        positions = F.interpolate(table, size=(side, side), mode="bilinear", align_corners=True)
        x = x + positions[0].permute(1, 2, 0).reshape(side * side, h)
        levels = []
        for i in range(v["depth"]):
            x = self.block(i, x, side)
            if i in v["deepstack"]:
                levels.append(self.merger(f"vision.deepstack{len(levels)}", x, side, True))
        return self.merger("vision.merger", x, side, False), levels

    def video_angles(self, s):
        """cos and sin [1, s, 1, d / 2] of frames, rows and columns, in that order along a head's pairs."""
        grid, pairs = video_grid(s), self.m["kv_channels"] // 2
        frames, height, width = grid
        place = torch.arange(s)
        places = (place // (height * width), place // width % height, place % width)
        counts = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
        angle = torch.cat([p[:, None].double() * 1e4 ** (-torch.arange(n).double() / n) for p, n in zip(places, counts)], 1)
        return angle.cos().float()[None, :, None], angle.sin().float()[None, :, None]

    def heads(self, x, norm, turns=None):
        """Normed over all heads [b, s, heads, d]; neighbours turn."""
        if norm:
            x = F.rms_norm(x, (x.shape[-1],), self.w[norm].view(-1), self.m["layernorm_epsilon"])
        x = x.view(x.shape[0], x.shape[1], -1, self.m["kv_channels"])
        if turns:
            (c, s), a, b = turns, x[..., ::2], x[..., 1::2]
            x = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
        return x

    def attend(self, q, k, v):
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return o.transpose(1, 2).flatten(2)

    def modulated(self, x, shift, scale):
        return F.layer_norm(x, (x.shape[-1],), eps=self.m["layernorm_epsilon"]) * (1 + scale) + shift

    def video_block(self, i, x, slots, text, turns):
        """slots [b, 6, h]: of self-attention and MLP each shift, scale, gate."""
        p = f"layer{i}."
        shift, scale, gate = (slots[:, n : n + 1] + self.w[p + "attn.mod.weight"][n] for n in range(3))
        q, k, v = self.linear(self.modulated(x, shift, scale), p + "attn.qkv").chunk(3, -1)
        q, k = self.heads(q, p + "attn.q_norm.weight", turns), self.heads(k, p + "attn.k_norm.weight", turns)
        x = x + gate * self.linear(self.attend(q, k, self.heads(v, None)), p + "attn.proj")
        y = self.biased(F.layer_norm(x, (x.shape[-1],), self.w[p + "cross.norm.weight"].view(-1), eps=self.m["layernorm_epsilon"]), p + "cross.norm")
        k, v = self.linear(text, p + "cross.kv").chunk(2, -1)
        q, k = self.heads(self.linear(y, p + "cross.q"), p + "cross.q_norm.weight"), self.heads(k, p + "cross.k_norm.weight")
        x = x + self.linear(self.attend(q, k, self.heads(v, None)), p + "cross.proj")
        shift, scale, gate = (slots[:, 3 + n : 4 + n] + self.w[p + "mlp.mod.weight"][n] for n in range(3))
        y = F.gelu(self.linear(self.modulated(x, shift, scale), p + "mlp.fc1"), approximate="tanh")
        return x + gate * self.linear(y, p + "mlp.fc2")

    def run_video(self, d):
        b, s, h = self.cfg["batch"]["micro_batch_size"], self.cfg["batch"]["seq_length"], self.m["hidden_size"]
        noisy, target = (self.step[n + ".mb0"].view(b, s, -1) for n in ("noisy", "target"))
        x = self.linear(noisy, "dit.patch")
        time = self.linear(F.silu(self.linear(self.step["time.mb0"].view(b, -1), "dit.time1")), "dit.time2")
        slots = self.linear(F.silu(time), "dit.time3").view(b, 6, h)
        text = self.step["text.mb0"].view(b, d["text_len"], -1)
        text = self.linear(F.gelu(self.linear(text, "dit.text1"), approximate="tanh"), "dit.text2")
        for i in range(len(self.m["layers"])):
            x = self.video_block(i, x, slots, text, self.video_angles(s))
        shift, scale = (time[:, None] + self.w["dit.head.mod.weight"][n] for n in range(2))
        loss = F.mse_loss(self.linear(self.modulated(x, shift, scale), "dit.head"), target)
        loss.backward()
        return loss.item()

    def run(self):
        if self.m.get("diffusion"):
            return self.run_video(self.m["diffusion"])
        b, s = self.cfg["batch"]["micro_batch_size"], self.cfg["batch"]["seq_length"]
        ids = self.step["ids.mb0"].long().view(b, s)
        labels = self.step["labels.mb0"].long().view(-1)
        x = F.embedding(ids, self.w["embedding.weight"])
        vision, levels, layers = self.m.get("vision"), [], len(self.m["layers"])
        if vision:
            merged, levels = self.tower()
            first, last = vision["start"], vision["start"] + merged.shape[1]
            x = torch.cat([x[:, :first], merged, x[:, last:]], 1)
        hyper = self.m.get("hyper_connections")
        if hyper:
            x = x[:, :, None].expand(-1, -1, hyper["num_residual_streams"], -1)
        for i, kind in enumerate(self.m["layers"]):
            x = self.layer(i, i, kind, x)
            for level in levels[i : i + 1] if i + 1 < layers else levels[i:]:
                x = x + F.pad(level, (0, 0, first, s - last))
        y = self.norm(self.head_stream(x, ""), "final_norm.weight")
        head = self.w.get("head.weight", self.w["embedding.weight"])
        entropy = lambda y, labels: F.cross_entropy(F.linear(y, head).view(-1, head.shape[0]), labels)
        loss, ahead = entropy(y, labels), torch.zeros(())
        depths, kinds = self.m["mtp_num_layers"], self.m["mtp_layers"]
        for k in range(depths):  # multi-token prediction
            held = 0 if self.m["mtp_repeated"] else k
            p, first = f"mtp{held}.", len(self.m["layers"]) + held * len(kinds)
            e = F.embedding(self.step[f"ids.mtp{k}.mb0"].long().view(b, s), self.w["embedding.weight"])
            e = self.norm(e, p + "embedding_norm.weight")
            if hyper:  # of the streams, each alone
                y = F.linear(self.norm(x, p + "hidden_norm.weight"), self.w[p + "hidden_proj.weight"])
                x = F.linear(e, self.w[p + "embedding_proj.weight"])[:, :, None] + y
            else:
                y = self.norm(y, p + "hidden_norm.weight")
                x = F.linear(torch.cat([e, y], -1), self.w[p + "proj.weight"])
            for i, kind in enumerate(kinds):
                x = self.layer(first + i, len(self.m["layers"]) + k * len(kinds) + i, kind, x)
            y = self.norm(self.head_stream(x, p), p + "final_norm.weight")
            ahead = ahead + entropy(y, self.step[f"labels.mtp{k}.mb0"].long().view(-1))
        if depths:
            ahead = self.m["mtp_loss_scaling_factor"] / depths * ahead
        (loss + self.aux + ahead).backward()
        return loss.item()

    def layer(self, i, local, kind, x):
        """Layer `i` of the model, number `local` of those that were run."""
        if kind in ("dense", "moe", "attn_only"):
            x = self.around(i, "attn", lambda x: self.attention(i, x), x)
        if kind in ("delta_dense", "delta_moe"):
            x = self.delta_net(i, x)
        if kind in ("dense", "mlp_only", "delta_dense"):
            x = self.mlp(i, x)
        if kind == "mamba":
            x = self.mamba(i, x)
        if kind in ("moe", "moe_only", "delta_moe"):
            x = self.around(i, "moe", lambda x: self.moe(i, local, x), x)
        return x


def check(folder):
    with open(os.path.join(folder, "config.json")) as f:
        cfg = json.load(f)
    p = cfg["parallel"]
    for what in ("tp", "pp", "cp"):
        if p[what] != 1:
            print(f"{folder}: the referee knows one rank; dump with -{what} 1")
            return False
    if cfg["batch"]["num_microbatches"] != 1:
        print(f"{folder}: the referee runs one micro-batch; dump with --max_microbatches 1")
        return False
    w, grads, step = (load(os.path.join(folder, n + ".safetensors")) for n in ("weights", "grads", "step"))
    w = {k: v.requires_grad_() for k, v in w.items()}
    model = Step(cfg, w, step)
    loss = model.run()
    theirs = step["loss"].item()
    ok = abs(loss - theirs) <= LOSS_TOLERANCE * abs(loss)
    print(f"{folder}: loss {theirs:.6f}, PyTorch {loss:.6f}: {'agrees' if ok else 'DIFFERS'}")
    worst, sizes = [], model.hyper_sizes()
    for name, t in w.items():
        g = grads[name + ".grad"]
        mine = t.grad if t.grad is not None else torch.zeros_like(t)
        norm = mine.norm().item()
        # A bias sums its rows' gradients, which may cancel: its error is judged by the size of what is summed.
        if name in model.rows:
            norm = max(norm, math.sqrt(sum(t.grad.square().sum().item() for t in model.rows[name])))
        norm = max(norm, sizes.get(name, 0.0))
        error = (g - mine).norm().item() / norm if norm else g.norm().item()
        worst.append((error, name))
    worst.sort(reverse=True)
    bad = [x for x in worst if not x[0] <= GRADIENT_TOLERANCE]
    draws = []

    def by_storage(name):
        """Relative change by the draws so far, their root mean square."""
        mine = w[name].grad
        if mine is None or not mine.norm():
            return 0.0
        return math.sqrt(sum((d[name] - mine).square().sum().item() for d in draws) / len(draws)) / mine.norm().item()

    def draw():
        """One more, and what is beyond all of them."""
        rounded = gradients_of_storage(cfg, w, step, len(draws))
        draws.append({name: rounded[name] for _, name in bad})
        return [name for error, name in bad if not error <= ROUNDINGS * by_storage(name)]

    beyond = draw() if bad else []
    for _ in range(DRAWS - 1 if beyond else 0):
        beyond = draw()
    for error, name in bad:
        more = f" ({DRAWS} draws)" if len(draws) > 1 else ""
        print(f"  {name}: relative error {error:.2e}, of bf16 storage alone{more} {by_storage(name):.2e}{' EXCEEDS' if name in beyond else ''}")
    for error, name in [] if bad else worst[:3]:
        print(f"  {name}: relative error {error:.2e}")
    text = f", {len(beyond)} of them beyond {ROUNDINGS} times what bf16 storage alone changes" if bad else ""
    print(f"  {len(worst)} gradients, {len(bad)} beyond {GRADIENT_TOLERANCE:.1e}{text}")
    return ok and not beyond


if __name__ == "__main__":
    sys.exit(0 if all([check(d) for d in asked]) else 1)
