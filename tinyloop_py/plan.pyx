"""The forward pass of a model as a flat array of phases, built once from its config and run by the native library."""

cimport cython
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from .abi cimport (
    TL_ACT_GELU, TL_ACT_RELU2, TL_ACT_SILU, TL_INIT_INPUT, TL_INIT_NORMAL, TL_INIT_ZERO, TL_INT4, TL_NORM_POST, TL_NORM_PRE, TL_NORM_SANDWICH,
    TL_NORM_SUM_SANDWICH, TL_PAGE_POSITIONS, TL_PHASE_ATTEND, TL_PHASE_DOWN, TL_PHASE_EMBED, TL_PHASE_GATE_UP, TL_PHASE_GATED, TL_PHASE_HEAD,
    TL_PHASE_INJECT, TL_PHASE_NORM, TL_PHASE_OUT, TL_PHASE_QKV, TL_PHASE_ROPE, TL_PHASE_SAVE_INPUT, TL_PHASE_STATE_INIT, TL_QK_NORM_FULL,
    TL_QK_NORM_HEAD, TL_QK_NORM_NONE, TL_STAGE_CODA, TL_STAGE_CORE, TL_STAGE_PRELUDE, tl_phase, tl_plan_desc,
)
from .context cimport Context, PackedMatrix
from .memory cimport Buffer
from .pages cimport KvStore, PageSpace

from .context import DTYPES
from .rope import rope_tables

BLOCK_NORMS = {"pre": TL_NORM_PRE, "sandwich": TL_NORM_SANDWICH, "sum_sandwich": TL_NORM_SUM_SANDWICH, "post": TL_NORM_POST}
ACTIVATIONS = {"silu": TL_ACT_SILU, "gelu": TL_ACT_GELU, "relu2": TL_ACT_RELU2}
STATE_INITS = {"input": TL_INIT_INPUT, "zero": TL_INIT_ZERO, "normal": TL_INIT_NORMAL}
KV_TYPES = {**DTYPES, "int4": TL_INT4}
QK_NORMS = {"none": TL_QK_NORM_NONE, "head": TL_QK_NORM_HEAD, "full": TL_QK_NORM_FULL}
PARTS = (("prelude", TL_STAGE_PRELUDE), ("core", TL_STAGE_CORE), ("coda", TL_STAGE_CODA))


cdef class _Phases:
    """The array while it is built."""

    cdef tl_phase *phases
    cdef int n, capacity
    cdef object config, weights
    cdef list sections

    def __cinit__(self, config, weights):
        self.config, self.weights = config, weights
        self.capacity = 5 * config.n_layers + 8
        self.phases = <tl_phase *>calloc(self.capacity, sizeof(tl_phase))
        if self.phases == NULL:
            raise MemoryError
        self.sections = []

    def __dealloc__(self):
        free(self.phases)

    cdef tl_phase *add(self, int kind, int part, int layer=0) except NULL:
        assert self.n < self.capacity
        cdef tl_phase *p = self.phases + self.n
        self.n += 1
        p.size = sizeof(tl_phase)
        p.kind, p.part, p.layer = kind, part, layer
        p.scale = 1.0
        return p

    cdef const float *vector(self, str name):
        """Address of a vector, NULL where the model has none of that name."""
        buffer = self.weights.vectors.get(name)
        return NULL if buffer is None else <const float *>(<Buffer>buffer).pointer

    cdef int set_weight(self, tl_phase *p, str name) except -1:
        p.weight = (<PackedMatrix>self.weights.matrices[name]).matrix
        return 0

    cdef int add_layer(self, str name, int layer, int part, int index) except -1:
        c = self.config
        cdef tl_phase *p = self.add(TL_PHASE_QKV, part, index)
        self.set_weight(p, f"{name}.qkv")
        p.flags = 0 if layer in c.nope_layers or not c.rotary_dim else TL_PHASE_ROPE
        p.norm = self.vector(f"{name}.attn_norm.weight")
        p.bias = self.vector(f"{name}.attn.qkv.bias")
        p.q_norm = self.vector(f"{name}.attn.q_norm.weight")
        p.k_norm = self.vector(f"{name}.attn.k_norm.weight")
        p = self.add(TL_PHASE_ATTEND, part, index)
        p.window = c.window(layer)
        p = self.add(TL_PHASE_OUT, part, index)
        self.set_weight(p, f"{name}.o")
        p.bias = self.vector(f"{name}.attn.o.bias")
        p.block_norm = BLOCK_NORMS[c.block_norm]
        p.post_norm = self.vector(f"{name}.attn_post_norm.weight")
        p = self.add(TL_PHASE_GATE_UP, part, index)
        self.set_weight(p, f"{name}.gate_up")
        p.flags = TL_PHASE_GATED if c.mlp == "gated" else 0
        p.option = ACTIVATIONS[c.activation]
        p.norm = self.vector(f"{name}.mlp_norm.weight")
        p = self.add(TL_PHASE_DOWN, part, index)
        self.set_weight(p, f"{name}.down")
        p.block_norm = BLOCK_NORMS[c.block_norm]
        p.post_norm = self.vector(f"{name}.mlp_post_norm.weight")
        return 0

    cdef int add_loop_norm(self, int part) except -1:
        cdef tl_phase *p = self.add(TL_PHASE_NORM, part)
        p.norm = self.vector("loop_norm.weight")
        return 0

    cdef int build(self) except -1:
        c = self.config
        cdef tl_phase *p = self.add(TL_PHASE_EMBED, TL_STAGE_PRELUDE)
        layers = {"prelude": c.n_prelude, "core": c.n_core, "coda": c.n_coda}
        cdef int layer = 0
        self.set_weight(p, "embed")
        p.scale = c.embed_scale
        for name, part in PARTS:
            self.sections.append(0 if name == "prelude" else self.n)
            if name == "core" and c.inject != "none":
                p = self.add(TL_PHASE_INJECT, part)
                if c.inject == "concat_linear":
                    self.set_weight(p, "inject")
            if name == "coda" and c.loop_norm == "last":
                self.add_loop_norm(part)
            for index in range(layers[name]):
                self.add_layer(f"{name}.{index}", layer, part, index)
                layer += 1
            if name == "prelude":
                p = self.add(TL_PHASE_STATE_INIT, part)
                p.flags = TL_PHASE_SAVE_INPUT if c.inject != "none" else 0
                p.option = STATE_INITS[c.state_init]
                p.scale = c.state_init_std
                p.seed = c.state_init_seed
            if name == "core" and c.loop_norm == "every":
                self.add_loop_norm(part)
        self.sections.append(self.n)
        p = self.add(TL_PHASE_HEAD, TL_STAGE_CODA)
        self.set_weight(p, "embed" if c.tied_embeddings else "head")
        p.norm = self.vector("final_norm.weight") if c.final_norm else NULL
        p.scale = c.logit_scale
        p.softcap = c.logit_softcap
        self.sections.append(self.n)
        return 0


cdef tl_plan_desc sizes_of(config, str kv_dtype, int max_rows, int max_out, int max_pos) except *:
    cdef tl_plan_desc d
    memset(&d, 0, sizeof(d))
    d.size = sizeof(d)
    d.vocab_size, d.dim, d.ffn_dim = config.vocab_size, config.dim, config.ffn_dim
    d.n_heads, d.n_kv_heads, d.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
    d.n_layers[<int>TL_STAGE_PRELUDE] = config.n_prelude
    d.n_layers[<int>TL_STAGE_CODA] = config.n_coda
    d.n_layers[<int>TL_STAGE_CORE] = config.n_core
    d.norm_eps = config.norm_eps
    d.qk_norm = QK_NORMS[config.qk_norm]
    d.rope_interleaved = config.rope_style == "interleaved"
    d.rotary_dim = config.rotary_dim
    d.kv_dtype = KV_TYPES[kv_dtype]
    d.max_rows, d.max_out, d.max_pos = max_rows, max_out, max_pos
    d.table_stride = (max_pos + TL_PAGE_POSITIONS - 1) // TL_PAGE_POSITIONS
    return d


@cython.no_gc_clear  # the library must outlive the handle
cdef class Plan:
    """A model's forward pass on one backend, with its KV store and scratch memory.

    Parameters
    ----------
    max_rows
        Tokens that one step runs at most; what bounds scratch memory.
    max_out
        Rows of a step that may reach the head.
    kv_budget
        See `KvStore`.
    keep_operands
        Have pages for the operands of the QKV products too: what an h mode model holds beyond a call.
    """

    def __init__(
        self, Context context, config, weights, str kv_dtype, int max_rows, int max_out, int max_pos, kv_budget=None, bint keep_operands=False,
    ):
        cdef uint64_t nbytes
        cdef _Phases phases = _Phases(config, weights)
        self.context = context
        self.desc = sizes_of(config, kv_dtype, max_rows, max_out, max_pos)
        phases.build()
        cos, sin = (context.upload(table, "the rope tables") for table in rope_tables(config, max_pos))
        self.desc.rope_cos = <const float *>(<Buffer>cos).pointer
        self.desc.rope_sin = <const float *>(<Buffer>sin).pointer
        self.desc.phases = phases.phases
        self.desc.n_phases = phases.n
        for i, first in enumerate(phases.sections):
            self.desc.section[<int>i] = first
        self.keeps_operands = keep_operands
        self.make_store(kv_budget)
        context.library.check(context.library.f.plan_create(context.handle, &self.desc, &self.handle), "building the plan")
        self.desc.phases = NULL
        context.library.check(context.library.f.plan_scratch_nbytes(self.handle, &nbytes), "sizing scratch memory")
        scratch = context.alloc(nbytes, "scratch")
        context.library.check(context.library.f.plan_bind(self.handle, <void *>(<Buffer>scratch).pointer), "binding scratch memory")
        context.wait()  # until it is cleared: what the library writes there does not wait for the stream
        self.weights = weights
        self._keep = (cos, sin, scratch)

    def __dealloc__(self):
        if self.handle != NULL:
            self.context.library.f.plan_destroy(self.handle)

    cdef int make_store(self, kv_budget) except -1:
        """Reserves addresses for the pages of each part and kind: the budget's worth, or as much as the machine has memory."""
        cdef uint64_t nbytes
        cdef int i, part
        spaces = []
        n_free = self.context.free_nbytes()
        limit = kv_budget if kv_budget is not None else n_free if n_free is not None else 1 << 36
        for i in range(6 if self.keeps_operands else 3):
            part = i % 3
            if not self.desc.n_layers[part]:
                spaces.append(None)
                continue
            size = self.context.library.f.plan_page_nbytes if i < 3 else self.context.library.f.plan_operand_page_nbytes
            self.context.library.check(size(&self.desc, part, &nbytes), "sizing pages")
            nbytes = (nbytes + 63) // 64 * 64
            space = PageSpace(self.context.alloc_range(max(limit, nbytes)), nbytes)
            if i < 3:
                self.desc.kv_base[part] = <void *><uintptr_t>space.base
            else:
                self.desc.operand_base[part] = <void *><uintptr_t>space.base
            spaces.append(space)
        self.store = KvStore(tuple(spaces), kv_budget, self.context.free_nbytes, self.context.page_copy())
        return 0

    @property
    def scratch_nbytes(self):
        """Bytes of scratch memory."""
        return self._keep[2].nbytes if self._keep else 0

    @property
    def n_clamped(self):
        """K and V values that were clamped to float16's range so far."""
        cdef uint64_t n = 0
        if self.handle != NULL:
            self.context.wait()
            self.context.library.check(self.context.library.f.plan_n_clamped(self.handle, &n), "asking the plan")
        return n

    def close(self):
        """Frees KV, scratch and weights. Idempotent."""
        if self.handle != NULL:
            self.context.library.f.plan_destroy(self.handle)
            self.handle = NULL
        self.store.close()
        self.weights = self._keep = None
