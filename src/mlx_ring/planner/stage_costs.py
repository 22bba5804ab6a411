"""Memory and time of a stage on a machine, from counts of bytes and operations. Pure.

A step reads its weights once, whatever the number of rows, and multiplies for each of them: the slower of both counts.
Each row adds attention over its context, and each layer, drawn token and step adds a fixed cost. On a measured machine,
each of these is what was found there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mlx_cpu_kernels.machine import scratch_bytes
from mlx_ring.core.types import LONG_CHUNK_CONTEXT, LONG_CHUNK_TOKENS
from mlx_ring.host.machine_profile import WeightRate
from mlx_ring.planner.plan import Times
from mlx_ring.planner.profiles import LayerKinds, LayerProfile, LoadedForms, ModelProfile, NodeProfile
from mlx_ring.planner.request import (
    FULL_PRECISION_BITS,
    Chunks,
    Demand,
    chunks_alone,
    held_kv_bytes,
    limited_kv_bytes,
    planned_kv_bytes,
    usual_chunks,
)

TOKEN_BYTES = 4
"""Bytes of a drawn token, as the last stage sends it back to the first."""
_PER_HIDDEN_NUMBER, _PER_WIDEST_NUMBER = 16, 10
"""Peak numbers of activations for one token of a prompt, by number of the hidden size, and of a product's inputs at most.

MLX allocates results of operations that begin later. Measured on a CPU with float32 numbers, Qwen3 of 2,048 queries: 46,000
for 1,024 and 3,072 of them, and 73,000 for 2,048 and 6,144, with 3 layers and with 12. Experts' numbers come on top.
"""
_FLOAT_BYTES = 4
_FUSED_WIDTH, _LEAST_WIDTH, _SCORES_AND_WEIGHTS = 128, 64, 2
"""Numbers of the widest heads for which MLX fuses attention on GPUs, and of narrow ones; and arrays that hold a number for each score."""
PART_FOR_LONG_CHUNKS = 0.5
"""Part of the memory that is kept free, which long chunks of prompts may take."""
_TOO_MUCH = 1e18
"""Bytes that no machine has, as the memory of stages whose KV cache is larger than `kv_memory_bytes`."""
_HALF_TILE = 16
"""Rows that are empty on average in the last tile of a product."""

Table = NDArray[np.float64]
"""`(layers + 1, layers + 1)`: by first layer and end; infinite where no stage can be."""


class StageTables:
    """Sums over layers, so that the costs of a stage are differences."""

    def __init__(self, model: ModelProfile, demand: Demand) -> None:
        self.model = model
        self.demand = demand
        self._memory: dict[LayerKinds, Table] = {}
        self._forms = LoadedForms(model)
        ends = np.arange(len(model.layers) + 1)
        self._counts: Table = np.maximum(0.0, ends[None, :] - ends[:, None])

    def model_on(self, node: NodeProfile) -> ModelProfile:
        """Return the model as the machine loads it at least."""
        return self._forms.on(node)[-1].model

    def _memory_of(self, form: LayerKinds, node: NodeProfile) -> Table:
        if form not in self._memory:
            self._memory[form] = _held_bytes(form, self.demand)
        return (
            self._memory[form]
            + node.process_bytes
            + bytes_ahead(form.model, node.layers_ahead, self._counts, self.demand.step_tokens)
        )

    def memory(self, node: NodeProfile) -> Table:
        """Return the bytes of every possible stage, including working memory and the processes of mlx-ring.

        A stage whose KV cache exceeds the given memory needs more than any machine has.
        """
        *preferred, smallest = self._forms.on(node)
        held = self._memory_of(smallest, node)
        for form in preferred:
            larger = self._memory_of(form, node)
            held = np.where(larger <= node.usable_bytes, larger, held)
        return held

    def _form(self, node: NodeProfile, first: int, end: int) -> LayerKinds:
        """Return the form of a stage's weights: the preferred one that fits, or the smallest."""
        *preferred, smallest = self._forms.on(node)
        fitting = (form for form in preferred if self._memory_of(form, node)[first, end] <= node.usable_bytes)
        return next(fitting, smallest)

    def seconds(self, node: NodeProfile, rows: int, context_tokens: int) -> Times[Table]:
        """Return the seconds of a decode step of `rows` sequences; infinite where memory does not suffice."""
        *preferred, smallest = self._forms.on(node)
        table = self._seconds_of(smallest, node, rows, context_tokens)
        for form in preferred:
            fits = self._memory_of(form, node) <= node.usable_bytes
            table = np.where(fits, self._seconds_of(form, node, rows, context_tokens), table)
        fits = self.memory(node) <= node.usable_bytes
        fits &= np.arange(len(table))[:, None] < np.arange(len(table))[None, :]
        is_whole = np.zeros(table.shape, dtype=bool)
        is_whole[0, -1] = True
        times = times_on(node, table, is_whole=is_whole)
        unhindered = np.where(fits, times.unhindered, np.inf)
        return Times(
            unhindered, unhindered if node.cpu_quota is None else np.where(fits, times.steady, np.inf)
        )

    def stage_seconds(
        self, node: NodeProfile, first: int, end: int, rows: int, context_tokens: int
    ) -> Times[float]:
        """Return the seconds of a step of one stage, regardless of memory."""
        sums = self._seconds_before(self._form(node, first, end), node, rows, context_tokens)
        is_whole = first == 0 and end == len(sums) - 1
        times = times_on(node, sums[end : end + 1] - sums[first] + node.costs.step_s, is_whole=is_whole)
        return Times(float(times.unhindered[0]), float(times.steady[0]))

    def weight_bytes(self, node: NodeProfile, first: int, end: int) -> int:
        """Return the weight bytes of a stage, including embedding and head if it has them."""
        model = self._form(node, first, end).model
        held = sum(layer.weight_bytes for layer in model.layers[first:end])
        return held + model.ends_bytes(is_first=first == 0, is_last=end == len(model.layers))

    def kv_bytes(self, node: NodeProfile, first: int, end: int) -> int:
        """Return the bytes of a stage's KV cache: those that are given, or those of the promised load."""
        if self.demand.kv_memory_bytes is not None:
            return self.demand.kv_memory_bytes
        model = self.model_on(node)
        return int(sum(held_kv_bytes(layer, model, self.demand) for layer in model.layers[first:end]))

    def _seconds_of(self, form: LayerKinds, node: NodeProfile, rows: int, context_tokens: int) -> Table:
        sums = self._seconds_before(form, node, rows, context_tokens)
        return sums[None, :] - sums[:, None] + node.costs.step_s

    def _seconds_before(self, layers: LayerKinds, node: NodeProfile, rows: int, context_tokens: int) -> Table:
        """Return the computing seconds of all layers before each; the output head counts to the last layer."""
        model, rate = layers.model, node.rate(layers.model.weights)
        if rows > 1 and not model.batches:
            return rows * self._seconds_before(layers, node, 1, context_tokens)
        seconds = [
            layer_seconds(layer, node, rate, model, self.demand, rows, context_tokens)
            for layer in layers.kinds
        ]
        each = layers.by_layer(seconds)
        each[-1] += head_seconds(model.head_bytes, model.vocabulary, model.hidden_size, rate, rows)
        each[-1] += node.costs.draw_s + rows * model.vocabulary * node.costs.logit_s
        return before(each)

    def layer_seconds(self, node: NodeProfile, rows: int, context_tokens: int) -> Table:
        """Return the least steady seconds of each layer in a decode step, in any form of its weights: `(layers,)`.

        The output head counts to the last layer, and what a step takes beside its layers does not count.
        """
        each = [
            np.diff(self._seconds_before(form, node, rows, context_tokens)) for form in self._forms.on(node)
        ]
        computing = np.min(each, axis=0) * node.ratios.decode
        return computing if node.cpu_quota is None else node.cpu_quota.steady_s(computing)

    def prefill_seconds(
        self, node: NodeProfile, first: int, end: int, tokens: int, context: int = 0
    ) -> float:
        """Return the seconds of a stage's prefill of `tokens` tokens after `context` others."""
        chunks = self.usual(node, tokens, is_part=end - first < len(self.model.layers))
        return self.seconds_in(chunks, node, first, end, context)

    def seconds_in(self, chunks: Chunks, node: NodeProfile, first: int, end: int, context: int = 0) -> float:
        """Return the seconds of a stage's prefill in the given steps after a context."""
        form = self._form(node, first, end)
        seconds = prefill_layers(form, form.kinds, node, context, chunks)[first:end].sum()
        return float(seconds) * prefill_factor(node)

    def usual(self, node: NodeProfile, tokens: int, *, is_part: bool = False) -> Chunks:
        """Return the steps of a prompt that is not alone, or that is read by several stages."""
        most = self.demand.chunk_tokens or node.chunk_tokens
        return usual_chunks(tokens, min(most, (is_part and self.demand.even_tokens) or most))

    def alone_seconds(self, node: NodeProfile, tokens: int) -> float:
        """Return the seconds in which a machine with all layers reads a prompt alone."""
        chunks = self._long(node, tokens) or self.usual(node, tokens)
        return self.seconds_in(chunks, node, 0, len(self.model.layers), 0)

    def _long(self, node: NodeProfile, tokens: int) -> Chunks | None:
        """Return the chunks in which a machine with all layers reads a prompt alone; None if they are the usual ones."""
        usual, layers = node.chunk_tokens, len(self.model.layers)
        if tokens <= usual or not (most := long_chunk_on([(node, layers)], self.model, self.demand)):
            return None
        return chunks_alone(tokens, usual, most, partial(self.chunk_seconds, node, 0, layers))

    def chunk_seconds(self, node: NodeProfile, first: int, end: int, tokens: int, context: int) -> float:
        """Return the seconds of a prefill step with `tokens` tokens after a context."""
        step_s = node.costs.step_s / (node.cpu_quota.share if node.cpu_quota else 1.0)
        return self.seconds_in(((tokens, 1),), node, first, end, context) + step_s

    def prefill_table(self, node: NodeProfile, tokens: int, users: int = 1) -> Table:
        """Return the mean seconds of every possible stage's prefill of `users` prompts of `tokens` tokens, regardless of memory."""
        *preferred, smallest = self._forms.on(node)
        chunks = self.usual(node, tokens, is_part=True)

        def table(form: LayerKinds) -> Table:
            sums = before(prefill_layers(form, form.kinds, node, 0, chunks))
            return (sums[None, :] - sums[:, None]) * prefill_factor(node)

        seconds = table(smallest)
        for form in preferred:
            seconds = np.where(self._memory_of(form, node) <= node.usable_bytes, table(form), seconds)
        if self.demand.even_tokens or self._long(node, tokens) is not None:
            # Answers are in progress when the other prompts are read.
            other_s = self.prefill_seconds(node, 0, len(self.model.layers), tokens)
            seconds[0, -1] = (self.alone_seconds(node, tokens) + (users - 1) * other_s) / users
        return seconds


def prefill_factor(node: NodeProfile) -> float:
    """Return the wall-clock time of a prompt's computation over its computing time."""
    return node.ratios.prefill / (node.cpu_quota.share if node.cpu_quota else 1.0)


def times_on(
    node: NodeProfile, computing: Table, *, is_whole: NDArray[np.bool_] | bool = False
) -> Times[Table]:
    """Return the wall-clock times of decode steps on a machine, by the time of their computations.

    Args:
        node: the machine.
        computing: seconds of the computations.
        is_whole: True for stages with all layers.
    """
    computing = computing * node.ratios.decode
    overhead_s = np.where(is_whole, node.ratios.whole_overhead_s, node.ratios.overhead_s)
    if node.cpu_quota is None:
        return Times(computing + overhead_s, computing + overhead_s)
    unhindered, steady = node.cpu_quota.clock_s(computing), node.cpu_quota.steady_s(computing)
    return Times(unhindered + overhead_s, steady + overhead_s)


def layer_seconds(
    layer: LayerProfile,
    node: NodeProfile,
    rate: WeightRate,
    model: ModelProfile,
    demand: Demand,
    rows: int,
    context_tokens: int,
) -> float:
    """Return the seconds of one layer in a step; `rate` is the node's rate for the model."""
    read = layer.read_by(rows)
    # Nearly all of a layer's matrices have rows as long as the activations.
    matrix_rows = layer.flops_per_token / 2 / model.hidden_size * read / max(1, layer.read_bytes)
    read_s = read / rate.bandwidth + matrix_rows * rate.row_s
    products = max(read_s, _multiplied_s(layer, node, rate, model, rows, read_s))
    computed_s = products + rows * _look_back_seconds(layer, node, model, demand, context_tokens)
    computed_s += (rows - 1) * node.costs.row_s
    return _with_start(computed_s, _started_s(layer, node, model), node)


def _multiplied_s(
    layer: LayerProfile, node: NodeProfile, rate: WeightRate, model: ModelProfile, rows: int, read_s: float
) -> float:
    """Return the seconds of a layer's products with a step's rows, in the faster kernels: for single rows or for tiles of them."""
    if rows == 1 or not node.vector_s:
        return layer.flops_per_token * rows / rate.flops
    # Those for single rows take each further row alone, at most as long as in a pass of its own.
    further_s = (rows - 1) * layer.flops_per_token * node.vector_s
    one_by_one_s = min(read_s + further_s, rows * layer.read_bytes / rate.bandwidth)
    padded = rows if layer.has_experts else rows + _HALF_TILE
    flops = rate.flops * node.pace(layer, rows, model.hidden_size)
    return min(one_by_one_s, layer.flops_per_token * padded / flops)


def _with_start(computed_s: float, started_s: float, node: NodeProfile) -> float:
    """Return the seconds of a layer's computation and its start: of both, or of the longer one."""
    return max(computed_s, started_s) if node.costs.starts_ahead else computed_s + started_s


def _started_s(layer: LayerProfile, node: NodeProfile, model: ModelProfile) -> float:
    """Return the seconds of a layer in a step beside its products and attention."""
    costs = node.costs
    has_few_operations = model.is_quantized and not model.has_byte_scales
    layer_s = costs.quantized_layer_s if has_few_operations else costs.layer_s
    return layer_s + layer.has_experts * costs.experts_s + layer.has_state * costs.states_s


def _look_back_seconds(
    layer: LayerProfile, node: NodeProfile, model: ModelProfile, demand: Demand, context_tokens: int
) -> float:
    """Return the seconds of one row's attention: reading its KV or computing with it, whichever takes longer."""
    seen = context_tokens if layer.window is None else min(context_tokens, layer.window)
    kv_bytes = layer.kv_bytes_per_token * seen * demand.kv_factor(model.number_bytes)
    return max(
        (kv_bytes + _kept_bytes(layer, context_tokens)) / node.bandwidth,
        (seen * layer.query_width + context_tokens * layer.index_width) * node.costs.attention_s,
    )


def _kept_bytes(layer: LayerProfile, context_tokens: int) -> float:
    """Return the bytes that attention reads of what does not grow with the length: a window counts as far as it is full."""
    if layer.window is None or layer.kv_bytes_per_token:
        return layer.kv_bytes_per_sequence
    return layer.kv_bytes_per_sequence * min(1.0, context_tokens / max(1, layer.window))


def head_seconds(nbytes: int, vocabulary: float, hidden_size: int, rate: WeightRate, rows: int) -> float:
    """Return the seconds of the logits of `vocabulary` tokens."""
    return max(
        nbytes / rate.bandwidth + vocabulary * rate.row_s, 2 * rows * vocabulary * hidden_size / rate.flops
    )


def prefill_layers(
    form: LayerKinds,
    layers: Sequence[LayerProfile],
    node: NodeProfile,
    context: int,
    chunks: Chunks,
) -> Table:
    """Return the computing seconds of each layer in a prefill.

    Each chunk reads the weights that its tokens use, or multiplies with them, whichever takes longer. Every token also
    looks at those before it.

    Args:
        form: the model's layers, as the machine holds them.
        layers: each kind of them, or a rank's share of it.
        node: the machine.
        context: number of tokens before the prompt.
        chunks: its steps.
    """
    rate = node.rate(form.model.weights)
    tokens, steps = sum(size * count for size, count in chunks), sum(count for _, count in chunks)

    def seconds(layer: LayerProfile) -> float:
        products = sum(
            count
            * max(
                layer.read_by(size) / rate.bandwidth,
                layer.flops_per_token * size / (rate.flops * node.pace(layer, size, form.model.hidden_size)),
            )
            for size, count in chunks
        )
        scores = _scores(layer, form.model, context + tokens) - _scores(layer, form.model, context)
        started_s = steps * _started_s(layer, node, form.model)
        activations = tokens * form.model.hidden_size * node.activation_s
        activations += tokens * layer.has_state * layer.kv_bytes_per_sequence * node.scan_s
        return _with_start(products + activations + scores / node.flops, started_s, node)

    return form.by_layer([seconds(layer) for layer in layers])


def _scores(layer: LayerProfile, model: ModelProfile, tokens: int) -> float:
    """Return the operations of attention in a prefill: scores, weighted values and an indexer's scores, for pairs of tokens."""
    if layer.score_width:
        width = layer.score_width
    else:
        width = 2 * (layer.query_width or model.hidden_size) if layer.kv_bytes_per_token else 0
    seen = tokens if layer.window is None else min(tokens, layer.window)
    return 2 * width * (seen * tokens - seen * seen / 2) + layer.index_width * tokens**2


def _held_bytes(layers: LayerKinds, demand: Demand) -> Table:
    model, bytes_before = layers.model, _bytes_before(layers, demand)
    held = bytes_before[None, :] - bytes_before[:, None]
    if (given_bytes := demand.kv_memory_bytes) is not None:
        kv = before(layers.by_layer([limited_kv_bytes(layer, model, demand) for layer in layers.kinds]))
        held += np.where(kv[None, :] - kv[:, None] <= given_bytes, given_bytes, _TOO_MUCH)
    if model.is_tied:
        held[0, -1] -= min(model.embedding_bytes, model.head_bytes)
    return held + working_bytes(model, demand.step_tokens)


def working_bytes(model: ModelProfile, tokens: int) -> int:
    """Return the bytes of activations for `tokens` of a prompt, and of what products with quantized weights keep for themselves."""
    return _activation_bytes(model, tokens) + (
        scratch_bytes(model.widest, tokens) if model.is_quantized else 0
    )


def _activation_bytes(model: ModelProfile, tokens: int) -> int:
    numbers = _PER_HIDDEN_NUMBER * model.hidden_size + _PER_WIDEST_NUMBER * model.widest + model.routed
    return model.number_bytes * tokens * numbers


def activation_bytes(model: ModelProfile, layers: int, tokens: int, layers_ahead: float) -> float:
    """Return the bytes that a stage of some layers takes beside weights, KV and scores for `tokens` of a prompt."""
    return working_bytes(model, tokens) + float(bytes_ahead(model, layers_ahead, np.array(layers), tokens))


def score_bytes(model: ModelProfile, tokens: int, context_tokens: int, *, quantizes_kv: bool) -> int:
    """Return the bytes of attention's scores, where GPUs hold them: with heads of more than 128 numbers, and over quantized KV."""
    if model.shared is not None and model.shared.head_dim <= _FUSED_WIDTH and not quantizes_kv:
        return 0
    width = _LEAST_WIDTH if model.shared is None else model.shared.head_dim
    heads = max(layer.query_width for layer in model.layers) // width
    return _SCORES_AND_WEIGHTS * heads * tokens * context_tokens * model.number_bytes


def long_chunk_bytes(model: ModelProfile, layers: int, layers_ahead: float, *, quantizes_kv: bool) -> float:
    """Return the bytes that a stage of some layers takes beside weights and KV for the longest chunks of prompts."""
    scores = score_bytes(model, LONG_CHUNK_TOKENS, LONG_CHUNK_CONTEXT, quantizes_kv=quantizes_kv)
    return scores + activation_bytes(model, layers, LONG_CHUNK_TOKENS, layers_ahead)


def long_chunk_on(ranks: Iterable[tuple[NodeProfile, int]], model: ModelProfile, demand: Demand) -> int:
    """Return the most tokens of a prompt alone that these ranks may compute in a step; 0 for no more than usual.

    A head that loads them decides alike.

    Args:
        ranks: machine and number of layers of each rank of each stage.
        model: sizes as they are stored.
        demand: with `chunk_tokens`, no chunk is longer.
    """
    taken: dict[str, float] = defaultdict(float)
    for node, layers in ranks:
        if not node.long_chunk_tokens or demand.chunk_tokens is not None:
            return 0
        quantizes_kv = demand.kv_bits < FULL_PRECISION_BITS
        taken[node.name] += long_chunk_bytes(model, layers, node.layers_ahead, quantizes_kv=quantizes_kv)
        if taken[node.name] > PART_FOR_LONG_CHUNKS * node.reserve_share * node.memory_bytes:
            return 0
    return LONG_CHUNK_TOKENS


def bytes_ahead(model: ModelProfile, layers_ahead: float, layers: Table, tokens: int) -> Table | float:
    """Return the bytes of activations of further layers that exist at the same time, for numbers of layers, and `tokens` of a prompt."""
    if not layers_ahead:
        return 0.0
    return np.maximum(0.0, layers_ahead * layers - 1.0) * _activation_bytes(model, tokens)


def _bytes_before(layers: LayerKinds, demand: Demand) -> Table:
    """Return the bytes of all layers before each; embedding and head count to the outer layers."""
    model = layers.model
    sizes = layers.by_layer(
        [layer.weight_bytes + planned_kv_bytes(layer, model, demand) for layer in layers.kinds]
    )
    sizes[0] += model.embedding_bytes
    sizes[-1] += model.head_bytes + _FLOAT_BYTES * demand.sequences * model.vocabulary
    return before(sizes)


def before(each: Table) -> Table:
    """Return the sum of all layers before each, and of all."""
    return np.concatenate(([0.0], np.cumsum(each)))
