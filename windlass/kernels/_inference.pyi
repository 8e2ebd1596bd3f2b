"""Native kernels of inference on raw addresses; call them through windlass.kernels.packed_gemm, paged_attention and
fused_layers."""

class Cache: ...

def instruction_sets() -> list[str]: ...
def panel_bytes(code: int, outputs: int, features: int) -> int: ...
def pack(code: int, weight: int, outputs: int, features: int, panels: int, threads: int) -> None: ...
def linear(
    instruction_set: int,
    code: int,
    panels: int,
    outputs: int,
    features: int,
    scales: int,
    bias: int,
    x: int,
    y: int,
    rows: int,
    is_bf16: bool,
    threads: int,
    rounds_inputs: bool,
) -> None: ...
def cache(
    code: int,
    keys: int,
    values: int,
    key_scales: int,
    value_scales: int,
    blocks: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
) -> Cache: ...
def attention(
    instruction_set: int,
    cache: Cache,
    query: int,
    out: int,
    is_bf16: bool,
    tokens: int,
    heads: int,
    block_table: int,
    table_stride: int,
    query_start: int,
    context_lengths: int,
    sequences: int,
    scaling: float,
    softcap: float,
    window: int,
    chunk: int,
    sinks: int,
    threads: int,
) -> None: ...
def write_cache(
    instruction_set: int, cache: Cache, key: int, value: int, is_bf16: bool, slots: int, tokens: int, threads: int
) -> None: ...
def draw_tokens(
    instruction_set: int, scores: int, rows: int, vocabulary: int, settings: int, tokens: int, threads: int
) -> None: ...
def rms_norm(
    instruction_set: int,
    x: int,
    residual: int,
    weight: int,
    out: int,
    is_bf16: bool,
    rows: int,
    features: int,
    epsilon: float,
    threads: int,
) -> None: ...
def rotary(
    instruction_set: int,
    x: int,
    is_bf16: bool,
    tokens: int,
    token_stride: int,
    heads: int,
    head_dim: int,
    rotary_dim: int,
    cosines: int,
    sines: int,
    threads: int,
) -> None: ...
def gated_activation(
    instruction_set: int,
    activation: int,
    gate_up: int,
    out: int,
    is_bf16: bool,
    rows: int,
    features: int,
    threads: int,
) -> None: ...
def read_memory(instruction_set: int, address: int, bytes: int, threads: int) -> int: ...

class Experts:
    def __init__(self, instruction_set: int, activation: int, features: int, inner: int, is_bf16: bool) -> None: ...
    def add_linear(
        self, code: int, panels: int, outputs: int, features: int, scales: int, rounds_inputs: bool
    ) -> None: ...
    def add_foreign_product(self, product: int, weight: int, outputs: int, features: int) -> None: ...
    def run(
        self, x: int, index: int, weights: int, are_bf16: bool, out: int, tokens: int, chosen: int, threads: int
    ) -> None: ...

class StepProgram:
    def __init__(self, instruction_set: int) -> None: ...
    def add_linear(
        self,
        code: int,
        panels: int,
        outputs: int,
        features: int,
        scales: int,
        bias: int,
        x: int,
        y: int,
        count: tuple[int, int],
        is_bf16: bool,
        rounds_inputs: bool,
    ) -> None: ...
    def add_foreign_product(
        self, product: int, first_part: int, weight: int, x: int, y: int, count: tuple[int, int]
    ) -> None: ...
    def add_rms_norm(
        self,
        x: int,
        weight: int,
        out: int,
        is_bf16: bool,
        count: tuple[int, int],
        features: int,
        epsilon: float,
        heads: int = 1,
        stride: int = 0,
    ) -> None: ...
    def add_rotary(
        self,
        x: int,
        is_bf16: bool,
        token_stride: int,
        heads: int,
        head_dim: int,
        rotary_dim: int,
        cosines: int,
        sines: int,
    ) -> None: ...
    def add_gated_activation(
        self, activation: int, gate_up: int, out: int, is_bf16: bool, count: tuple[int, int], features: int
    ) -> None: ...
    def add_gather(
        self,
        table: int,
        row_bytes: int,
        table_rows: tuple[int, int],
        more_rows: int,
        index: int,
        out: int,
        count: tuple[int, int],
    ) -> None: ...
    def add_sum(self, a: int, b: int, out: int, is_bf16: bool, count: tuple[int, int]) -> None: ...
    def add_experts(
        self,
        experts: Experts,
        x: int,
        index: int,
        weights: int,
        are_bf16: bool,
        out: int,
        count: tuple[int, int],
        chosen: int,
    ) -> None: ...
    def add_attention(
        self,
        cache: Cache,
        query: int,
        query_stride: int,
        key: int,
        key_stride: int,
        value: int,
        value_stride: int,
        out: int,
        is_bf16: bool,
        heads: int,
        slots: int,
        block_table: int,
        table_stride: int,
        query_start: int,
        context_lengths: int,
        scaling: float,
        softcap: float,
        window: int,
        chunk: int,
        sinks: int,
    ) -> None: ...
    def run(self, tokens: int, rows: int, sequences: int, threads: int) -> None: ...
