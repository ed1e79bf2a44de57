"""Small programs that ask one thing each of a scheduler."""

from __future__ import annotations

# Two layers, data-parallel: the wgrad of layer 2 stands after the dgrad, updates come last.
DDP = """
    w1: f32[64] = parameter("w1")
    w2: f32[64] = parameter("w2")
    x: f32[64] = input("x")
    a1: f32[64] = aten.mul.Tensor(x, w1)
    a2: f32[64] = aten.mul.Tensor(a1, w2)
    d1: f32[64] = aten.mul.Tensor(a2, w2)
    g2: f32[64] = aten.mul.Tensor(a2, a1)
    s2: f32[64] = c10d.all_reduce(g2, "sum", "dp")
    r2: f32[64] = c10d.wait_tensor(s2)
    g1: f32[64] = aten.mul.Tensor(d1, x)
    s1: f32[64] = c10d.all_reduce(g1, "sum", "dp")
    r1: f32[64] = c10d.wait_tensor(s1)
    u1: f32[64] = aten.sub.Tensor(w1, r1)
    u2: f32[64] = aten.sub.Tensor(w2, r2)
    return update("w1", u1), update("w2", u2)
"""
DDP_SECONDS = {"a1": 2, "a2": 2, "d1": 2, "g2": 2, "g1": 2, "s1": 3, "s2": 3, "u1": 1, "u2": 1}

# Three layers of sharded parameters, gathered for the forward and again for the backward.
ZERO3 = """
    p1: f32[64] = parameter("p1")
    p2: f32[64] = parameter("p2")
    p3: f32[64] = parameter("p3")
    x: f32[128] = input("x")
    g1: f32[128] = c10d.all_gather_into_tensor(p1, 2, "dp")
    w1: f32[128] = c10d.wait_tensor(g1)
    a1: f32[128] = aten.mul.Tensor(x, w1)
    g2: f32[128] = c10d.all_gather_into_tensor(p2, 2, "dp")
    w2: f32[128] = c10d.wait_tensor(g2)
    a2: f32[128] = aten.mul.Tensor(a1, w2)
    g3: f32[128] = c10d.all_gather_into_tensor(p3, 2, "dp")
    w3: f32[128] = c10d.wait_tensor(g3)
    a3: f32[128] = aten.mul.Tensor(a2, w3)
    h2: f32[128] = c10d.all_gather_into_tensor(p2, 2, "dp")
    v2: f32[128] = c10d.wait_tensor(h2)
    b2: f32[128] = aten.mul.Tensor(a3, v2)
    h1: f32[128] = c10d.all_gather_into_tensor(p1, 2, "dp")
    v1: f32[128] = c10d.wait_tensor(h1)
    b1: f32[128] = aten.mul.Tensor(b2, v1)
    return output("b1", b1)
"""
ZERO3_SECONDS = {"g1": 1, "g2": 1, "g3": 1, "h2": 1, "h1": 1, "a1": 4, "a2": 4, "a3": 4, "b2": 4, "b1": 4}

# A reduce-scatter of a gradient shares its link with gathers that the backward needs.
SHARED_LINK = """
    p1: f32[64] = parameter("p1")
    p2: f32[64] = parameter("p2")
    x: f32[128] = input("x")
    h2: f32[128] = c10d.all_gather_into_tensor(p2, 2, "dp")
    v2: f32[128] = c10d.wait_tensor(h2)
    b2: f32[128] = aten.mul.Tensor(x, v2)
    r2: f32[64] = c10d.reduce_scatter_tensor(b2, "sum", 2, "dp")
    d2: f32[64] = c10d.wait_tensor(r2)
    h1: f32[128] = c10d.all_gather_into_tensor(p1, 2, "dp")
    v1: f32[128] = c10d.wait_tensor(h1)
    e: f32[128] = aten.exp(b2)
    b1: f32[128] = aten.mul.Tensor(e, v1)
    r1: f32[64] = c10d.reduce_scatter_tensor(b1, "sum", 2, "dp")
    d1: f32[64] = c10d.wait_tensor(r1)
    u2: f32[64] = aten.sub.Tensor(p2, d2)
    u1: f32[64] = aten.sub.Tensor(p1, d1)
    return update("p1", u1), update("p2", u2)
"""
SHARED_LINK_SECONDS = {"h2": 2, "h1": 2, "r2": 4, "r1": 4, "b2": 2, "e": 2, "b1": 2, "u2": 1, "u1": 1}

# Tensor-parallel backward: the input's gradient is summed on the way to the next layer, weights' gradients are not.
TP = """
    w1: f32[64] = parameter("w1")
    w2: f32[64] = parameter("w2")
    x: f32[64] = input("x")
    gw2: f32[64] = aten.mul.Tensor(x, x)
    d2: f32[64] = aten.mul.Tensor(x, w2)
    s2: f32[64] = c10d.all_reduce(d2, "sum", "tp")
    f2: f32[64] = c10d.wait_tensor(s2)
    gw1: f32[64] = aten.mul.Tensor(f2, x)
    d1: f32[64] = aten.mul.Tensor(f2, w1)
    s1: f32[64] = c10d.all_reduce(d1, "sum", "tp")
    f1: f32[64] = c10d.wait_tensor(s1)
    return gradient("w2", gw2), gradient("w1", gw1), output("dx", f1)
"""
TP_SECONDS = {"gw2": 2, "d2": 2, "s2": 2, "gw1": 2, "d1": 2, "s1": 2}

TWO_GROUPS = """
    x: f32[64] = input("x")
    y: f32[64] = input("y")
    s: f32[64] = c10d.all_reduce(x, "sum", "dp")
    ws: f32[64] = c10d.wait_tensor(s)
    t: f32[64] = c10d.all_reduce(y, "sum", "tp")
    wt: f32[64] = c10d.wait_tensor(t)
    a: f32[64] = aten.exp(x)
    b: f32[64] = aten.add.Tensor(ws, wt)
    c: f32[64] = aten.add.Tensor(a, b)
    return output("c", c)
"""

RANDOM = """
    x: f32[64] = input("x")
    r1: f32[64] = aten.rand_like(x)
    s: f32[64] = c10d.all_reduce(r1, "sum", "dp")
    w: f32[64] = c10d.wait_tensor(s)
    a: f32[64] = aten.exp(w)
    r2: f32[64] = aten.rand_like(a)
    r3: f32[64] = aten.rand_like(x)
    e: f32[64] = aten.exp(x)
    return output("r2", r2), output("r3", r3), output("e", e)
"""

MUTATION = """
    x: f32[64] = input("x")
    m: f32[64] = buffer("m")
    s: f32[64] = c10d.all_reduce(x, "sum", "dp")
    w: f32[64] = c10d.wait_tensor(s)
    add_: f32[64] = aten.add_.Tensor(m, w)
    read: f32[64] = aten.exp(m)
    other: f32[64] = aten.exp(x)
    return output("read", read), output("other", other)
"""

CHAIN = """
    x: f32[64] = input("x")
    s: f32[64] = c10d.all_reduce(x, "sum", "dp")
    ws: f32[64] = c10d.wait_tensor(s)
    v: f32[8, 8] = aten.view(ws, [8, 8])
    t: f32[8, 8] = c10d.all_reduce(v, "sum", "tp")
    wt: f32[8, 8] = c10d.wait_tensor(t)
    y: f32[8, 8] = aten.neg(wt)
    a: f32[64] = aten.exp(x)
    b: f32[64] = aten.exp(a)
    c: f32[64] = aten.exp(b)
    return output("y", y), output("c", c)
"""

NOTHING_TO_HIDE = """
    x: f32[64] = input("x")
    a: f32[64] = aten.exp(x)
    s: f32[64] = c10d.all_reduce(a, "sum", "dp")
    w: f32[64] = c10d.wait_tensor(s)
    b: f32[64] = aten.exp(w)
    return output("b", b)
"""

COALESCED = """
    x: f32[64] = input("x")
    a: f32[64] = aten.exp(x)
    b: f32[64] = aten.neg(x)
    both: (f32[64], f32[64]) = c10d.all_reduce_coalesced([a, b], "sum", "dp")
    one: f32[64] = both[0]
    two: f32[64] = both[1]
    w1: f32[64] = c10d.wait_tensor(one)
    w2: f32[64] = c10d.wait_tensor(two)
    y: f32[64] = aten.add.Tensor(w1, w2)
    c: f32[64] = aten.exp(x)
    return output("y", y), output("c", c)
"""

# A small sum on the critical way comes while large gradients, needed last, queue for the same link.
URGENT = """
    x: f32[64] = input("x")
    g1: f32[64] = aten.neg(x)
    s1: f32[64] = c10d.all_reduce(g1, "sum", "dp")
    w1: f32[64] = c10d.wait_tensor(s1)
    g2: f32[64] = aten.exp(x)
    s2: f32[64] = c10d.all_reduce(g2, "sum", "dp")
    w2: f32[64] = c10d.wait_tensor(s2)
    n: f32[64] = aten.sin(x)
    s3: f32[64] = c10d.all_reduce(n, "sum", "dp")
    w3: f32[64] = c10d.wait_tensor(s3)
    c: f32[64] = aten.exp(w3)
    u1: f32[64] = aten.neg(w1)
    u2: f32[64] = aten.neg(w2)
    return output("c", c), output("u1", u1), output("u2", u2)
"""

# The link is taken, a gradient queues for it, and then a sum comes that everything else waits for.
QUEUED = """
    x: f32[64] = input("x")
    g0: f32[64] = aten.neg(x)
    s0: f32[64] = c10d.all_reduce(g0, "sum", "dp")
    g1: f32[64] = aten.neg(g0)
    s1: f32[64] = c10d.all_reduce(g1, "sum", "dp")
    n: f32[64] = aten.sin(g1)
    s2: f32[64] = c10d.all_reduce(n, "sum", "dp")
    w2: f32[64] = c10d.wait_tensor(s2)
    c: f32[64] = aten.exp(w2)
    w0: f32[64] = c10d.wait_tensor(s0)
    w1: f32[64] = c10d.wait_tensor(s1)
    return output("c", c), output("w0", w0), output("w1", w1)
"""

# What frees memory stands last, what needs much of it first.
WASTEFUL = """
    p: f32[64] = parameter("p")
    x: f32[64] = input("x")
    g: f32[128] = c10d.all_gather_into_tensor(p, 2, "dp")
    a: f32[64] = aten.neg(x)
    r: f32[32] = c10d.reduce_scatter_tensor(a, "sum", 2, "dp")
    b: f32[64] = aten.exp(x)
    d: f32[32] = c10d.wait_tensor(r)
    w: f32[128] = c10d.wait_tensor(g)
    y: f32[] = aten.sum(w)
    z: f32[] = aten.sum(b)
    return output("d", d), output("y", y), output("z", z)
"""
