"""The lines that a run prints before its steps: data, projection, model, memory, and the first pack."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch

from sftron import __version__
from sftron.checkpoint.model_folder import read_json
from sftron.config import Config
from sftron.data.chat.layout import kwarg_in_words
from sftron.data.dataset import PackedDataset
from sftron.data.formats.detect import FORMAT_SAMPLE, unread_columns
from sftron.data.overlap import overlaps
from sftron.kernels.device import is_gpu
from sftron.models.architecture import DROPOUTS
from sftron.models.attention import describe_backends
from sftron.models.mxfp4 import quant_method
from sftron.report.audit import Audit
from sftron.report.page import Inspection, inspect_packs
from sftron.report.terminal import pack_as_text, wants_color
from sftron.train.build_data import num_workers
from sftron.train.evaluation import watched_metric
from sftron.train.logs import console
from sftron.train.measured_memory import MeasuredPeak, total_memory
from sftron.train.memory import StepMemory, predict_run, with_reserve
from sftron.train.run import Change, Setup, frozen_dtype
from sftron.train.run_directory import RunDirectory
from sftron.train.sample import Sample
from sftron.visible_text import counted, visible_text

_WIDEST, _SHOWN_TOKENS, _SHOWN_LINES = 120, 400, 120
"""The columns, tokens and lines of the first pack on a console; its first conversation may have more tokens."""
_BUSY = 1.5
"""A first step that takes so many times its processor time has waited for cores."""
_MOST_KWARGS = 8
_HIGHEST_RATE = 1e-2
_MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations")
GROWTH_OF_TENSORS = 1.13
"""The growth of a process on a CPU for each byte of tensors; the C library keeps freed memory (SmolLM2)."""


_Lines = Iterator[tuple[str, str]]
"""Labels and texts of lines. A line without a label continues the one before it."""
_WARNING, _OUTCOME = "WARNING", "dry run"


def _show(lines: Iterable[tuple[str, str]]) -> None:
    for label, text in lines:
        if label == _WARNING:
            console.warn(text)
        else:
            console.write(f"{label:<10} {text}", is_needed=label == _OUTCOME)


def describe_run(setup: Setup, directory: RunDirectory | None) -> None:
    """Prints the data, the projection, the model and the first pack, and writes the page of the pack."""
    if not setup.ranks.is_main:
        return
    config, data = setup.config, setup.data
    describe_setup(setup)
    inspection = inspect_packs(
        [next(iter(data.dataset))],
        data.sample.rows,
        data.chat_tokenizer.decode,
        audit=Audit(data.preparation.source_names, data.preparation.targets, locate=data.preparation.location),
        title=f"{config.general.run_name}: what is trained",
    )
    _show_pack(inspection, str(directory.samples) if directory else "sftron inspect")
    if directory is not None:
        directory.write(directory.samples.name, inspection.as_html())
        _show([("samples", f"{directory.samples} shows this pack, and the audit of the sampled rows")])


def describe_setup(setup: Setup) -> None:
    """Prints the data, the projection and the model."""
    config, data = setup.config, setup.data
    describe_data(config, data.dataset, data.sample)
    _show(_evaluation_lines(setup))
    for line in data.projection.lines(config, data.dataset.token_budget):
        console.write(line)
    for warning in data.projection.warnings(config):
        console.warn(warning)
    _show(_model_lines(setup))


def describe_data(config: Config, dataset: PackedDataset, sample: Sample) -> None:
    _show([("sftron", f"{__version__}, run {config.general.run_name} in {config.run_dir}")])
    _show(_data_lines(config, dataset))
    _show(_sample_lines(dataset, sample))


def _data_lines(config: Config, dataset: PackedDataset) -> _Lines:
    preparation, weights = dataset.preparation, dataset.preparation.weights or ()
    for index, each in enumerate(preparation.datasets):
        share = f", {100 * weights[index] / sum(weights):.1f} % of the tokens" if weights else ""
        unread = unread_columns(each.first_rows(FORMAT_SAMPLE), each.row_format)
        names = "; not read: " + ", ".join(unread) if unread else ""
        held_out = f"; {counted(len(each.held_out), 'rows')} held out of training" if each.held_out else ""
        yield "data", f"{each.name}, read as {each.row_format}{share}{names}{held_out}"
        if pieces := each.pieces_in_words:
            yield "", pieces
    rows = "rows, read forward," if preparation.num_rows is None else counted(preparation.num_rows, "rows")
    workers = num_workers(config, dataset)
    fewer = f" ({config.data.num_workers} does not divide the lanes)" if workers != config.data.num_workers else ""
    packs = f"packs of {dataset.token_budget:,} tokens"
    yield "", f"{rows} in {dataset.lanes_in_words}, loader workers: {workers}{fewer}, {packs}"


def _sample_lines(dataset: PackedDataset, sample: Sample) -> _Lines:
    chat_tokenizer, audit = dataset.preparation.chat_tokenizer, sample.audit
    num_chats, turns, masks = audit.num_kept - sample.num_pretokenized - sample.num_documents, audit.turns, sample.masks
    stops = ", ".join(chat_tokenizer.tokenizer.convert_ids_to_tokens(list(sample.stop_ids))) or "none"
    if num_chats:
        others = num_chats - sample.num_equal
        control = f"; the other {others:,} spell control tokens, taken as plain text" if others else ""
        equal = f"{sample.num_equal:,} of {num_chats:,} sampled conversations have exactly the ids"
        yield "template", f"{equal} of apply_chat_template{control}"
        other = f"; {masks.not_compared.total():,} could not be compared: {masks.reasons}" if masks.not_compared else ""
        compared = f"{masks.num_equal:,} of {masks.num_compared:,} compared masks train exactly"
        yield "", f"{compared} what follows the generation prompt{other}"
        stopping = f"{turns.num_stop_trained:,} of {turns.num_turns:,} assistant turns train their stop token"
        yield "", f"{stopping}, {stops}"
    if sample.num_pretokenized:
        yield (
            "ids",
            f"{sample.num_pretokenized:,} sampled rows are pretokenized and used unchanged: their template and stop "
            f"tokens cannot be checked; control tokens that end a trained span: {stops}",
        )
    if sample.num_documents:
        num = counted(sample.num_documents, "sampled documents")
        yield (
            "text",
            f"{num} or pieces have the ids of tokenizer(text), control tokens as text; all but the first train",
        )
        yield "", chat_tokenizer.documents.frame_in_words
        if not num_chats and not sample.num_pretokenized:
            yield "", "all sampled rows are plain text: no chat is trained, and no answer's stop token"
    if kwargs := [*map(kwarg_in_words, chat_tokenizer.template.kwargs.items())]:
        yield "", f"the template gets {', '.join(kwargs)} (tokenizer.template_kwargs)"
    for text, count in audit.template_kwargs.most_common(_MOST_KWARGS):
        yield "", f"the template gets {text} from {counted(count, 'sampled rows')} (chat_template_kwargs)"
    if date := chat_tokenizer.template.date:
        yield "", f"the template writes the date: {date} for the whole run (tokenizer.date)"
    if sample.other_prompt:
        trained, generated = sample.other_prompt
        yield _WARNING, f"answers are trained after {trained!r}, but the generation prompt ends in {generated!r}"
    if empty := audit.empty_turns:
        yield _WARNING, f"empty answers, which teach the model to stop at once, among the sampled rows: {empty}"
    if count := audit.num_with_second_thought:
        yield (
            _WARNING,
            f"the template adds its own reasoning to answers whose content has some, in {count:,} sampled rows, and "
            "both are trained: move reasoning into reasoning_content, or set data.reasoning: strip",
        )
    for text, count in audit.left_out.most_common():
        yield _WARNING, f"the template leaves out the {text} of {count:,} messages of the sampled rows"
    for reason, count, first in audit.drops():
        yield "dropped", f"{count:,} of {len(sample.rows):,} sampled rows: {reason}; the first: {first}"


def _model_lines(setup: Setup) -> _Lines:
    """Yields the layout of several ranks, the architecture, its implementation, and the peak that MFU refers to."""
    options, model, llama = setup.config.model, setup.model, setup.model.architecture
    if (rate := setup.config.optimizer.learning_rate) > _HIGHEST_RATE:
        yield (
            _WARNING,
            f"optimizer.learning_rate {rate:g} is above {_HIGHEST_RATE:g}: AdamW moves each weight by about the rate "
            "in a step, which breaks most models. docs/lora.md has usual rates",
        )
    if (dimensions := setup.ranks.dimensions).size > 1:
        copies = "one copy" if dimensions.replicate == 1 else f"{dimensions.replicate} copies"
        sharing = f"; {dimensions.context} ranks share each pack" if dimensions.context > 1 else ""
        each = f"of the model, each on {dimensions.num_shards} ranks{sharing}"
        yield "ranks", f"{dimensions.size}: {copies} {each}"
    attention = describe_backends(model.attention) + (" (auto)" if options.attention == "auto" else "")
    loss = model.loss + (" (auto)" if options.loss == "auto" else "")
    compiled = {"on": "on", "off": "off", "auto": "off (auto)"}[options.compile]
    missing = "" if model.loss == "native" else " (which reports no entropy nor token accuracy)"
    yield (
        "model",
        f"{model.folder}: {counted(llama.num_hidden_layers, 'layers')}, hidden size {llama.hidden_size}, "
        f"{counted(llama.num_attention_heads, 'heads')} ({llama.num_key_value_heads} key-value)",
    )
    yield (
        "",
        f"on {setup.ranks.device}, attention {attention}, loss {loss}{missing}, {options.compute_dtype} compute, "
        f"float32 {'trained ' if model.adapters else ''}weights, "
        f"activation checkpointing {options.activation_checkpointing}, compile {compiled}",
    )
    for failure in model.attention_failures:
        yield _WARNING, failure
    if is_gpu(setup.ranks.device) and torch.get_float32_matmul_precision() != "highest":
        yield (
            _WARNING,
            "the GPU multiplies float32 numbers as TF32, with 3 digits instead of 7; unless your code wants that, "
            "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        )
    source = read_json(model.folder / "config.json")
    yield from _expert_lines(setup)
    if quant_method(source) is not None:
        exported = f"an export stores them as {options.compute_dtype}, not in MXFP4"
        yield "", f"the experts are stored in MXFP4 and read as bfloat16, exactly; {exported}"
    yield from _adapter_lines(setup)
    if setup.ranks.device.type == "cpu" and options.compute_dtype == "bfloat16":
        yield "", "most processors emulate bfloat16: model.compute_dtype: float32 is faster on them"
    if dropouts := [f"{key} {source[key]}" for key in DROPOUTS if source.get(key)]:
        yield "", f"without dropout: {', '.join(dropouts)} of config.json is not applied"
    is_known = model.peak.tflops is not None and setup.config.logging.peak_tflops is None
    is_other = is_known and options.compute_dtype != "bfloat16"
    yield "", str(model.peak) + (f", bf16's peak though compute is {options.compute_dtype}" if is_other else "")


def _expert_lines(setup: Setup) -> _Lines:
    if (mixture := setup.model.architecture.mixture) is None:
        return
    num_layers = sum(layer.mlp != "gated" for layer in setup.model.architecture.layers)
    shared = "" if mixture.shared_size is None else " and a shared one"
    frozen = setup.config.model.freeze_router or setup.model.adapters is not None
    is_stated = setup.config.model.router_aux_loss_coef is not None
    yield (
        "",
        f"{mixture.num_experts} experts in {counted(num_layers, 'layers')}, {mixture.num_selected}{shared} a token; "
        f"routers {'frozen' if frozen else 'trained'}; router_aux_loss_coef {setup.model.router_aux_loss_coef:g}"
        f"{'' if is_stated else ' (config.json)'}",
    )


def _adapter_lines(setup: Setup) -> _Lines:
    if (adapters := setup.model.adapters) is None:
        return
    spec = adapters.start.spec
    kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in spec.ranks))
    sizes = dict.fromkeys(f"rank {rank}, alpha {spec.alphas[name]:g}" for name, rank in spec.ranks.items())
    options = "".join(f", {name}" for name in ("rslora", "dora") if getattr(spec, name))
    saved = f", and all of {', '.join(spec.modules_to_save)}" if spec.modules_to_save else ""
    yield "lora", f"{'; '.join(sizes)}{options} on {counted(len(spec.ranks), 'layers')} ({kinds}){saved}"
    if adapters.origin:
        yield "", f"continuing from {visible_text(adapters.origin)}"
    frozen = setup.config.model.frozen_dtype
    frozen = setup.config.model.compute_dtype if frozen == "auto" else frozen
    yield "", f"{adapters.num_trained:,} parameters are trained; the others are frozen, matrices in {frozen}"


def _show_pack(inspection: Inspection, whole_in: str) -> None:
    """Prints the first pack, in color on a terminal. Leaves out the middle of a long one, and names `whole_in`
    instead."""
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    options = {
        "width": width,
        "max_tokens": _SHOWN_TOKENS,
        "max_lines": _SHOWN_LINES,
        "whole_in": whole_in,
        "locate": inspection.audit.locate,
    }
    console.write("")
    plain, colored = (
        pack_as_text(inspection.packs[0], inspection.decode, color=color, **options)
        for color in (False, wants_color(sys.stdout))
    )
    console.write(plain, colored)


def _evaluation_lines(setup: Setup) -> _Lines:
    """Yields the evaluation sets, and warnings about rows shared with the training data."""
    sets = setup.data.evaluation_sets
    found, num_compared = overlaps([each.preparation for each in sets], setup.data.preparation) if sets else ([], 0)
    num_rows = setup.data.preparation.num_rows
    for each, shared in zip(sets, found, strict=True):
        num_tokens = sum(len(conversation) for conversation in each.conversations)
        counts = sorted(each.dropped.items())
        dropped = "".join(f"; {counted(count, 'rows')} dropped: {reason}" for reason, count in counts)
        compared = "" if num_compared else "; not compared with the training data, which is streamed"
        size = f"{counted(len(each.conversations), 'conversations')}, {counted(num_tokens, 'tokens')}"
        yield "evaluation", f"{each.name}: {size}{dropped}{compared}"
        if limit := each.limit:
            most = f"{limit.max_rise:g}" if limit.max_rise is not None else f"{limit.max_rise_percent:g} %"
            yield "", f"its loss may rise by {most}; above that, the run {limit.on_exceeded}s"
        if shared:
            there, here = shared[0]
            part = "" if num_compared == num_rows else f" ({num_compared:,} of its {num_rows:,} rows were compared)"
            yield (
                _WARNING,
                f"{counted(len(shared), 'rows')} of {each.name} {'is' if len(shared) == 1 else 'are'} also in the "
                f"training data{part}; the first: {there} is {here}. Their loss proves nothing about new data",
            )
    config = setup.config
    if (patience := config.evaluation.patience) is not None:
        yield "", f"ends after {counted(patience, 'evaluations')} without a better {watched_metric(config, sets)}"
        if (schedule := config.optimizer.schedule) != "constant":
            yield (
                _WARNING,
                f"optimizer.schedule {schedule} falls over the full length of the run; if evaluation.patience ends "
                "the run earlier, it ends at a higher rate. Set schedule: constant to avoid this",
            )


def describe_memory(setup: Setup) -> StepMemory:
    """Prints and returns the predicted memory of a training step of the run."""
    device, adapters = setup.ranks.device, setup.model.adapters
    found = predict_run(setup, None if adapters is None else adapters.start.spec, frozen_dtype(setup.config))
    needed, memory = with_reserve(found.peak, on_gpu=is_gpu(device)), total_memory(device)
    parts = ", ".join(f"{part} {getattr(found, part) / 1e9:.2f}" for part in _MEMORY_PARTS)
    step = f"a step of {setup.data.dataset.token_budget:,} tokens"
    backends = describe_backends(setup.model.attention)
    fits = "fits" if needed <= memory else 'does not fit (see "Out of memory" in docs/troubleshooting.md)'
    size = f"{found.peak / 1e9:.2f} GB; {parts}"
    _show(
        [
            ("memory", f"predicted for {step} with the attention backend {backends}: {size}"),
            ("", f"{fits}: {needed / 1e9:.2f} GB with a reserve, of the {memory / 1e9:.2f} GB of {device}"),
            *_base_lines(setup, found, memory),
        ]
    )
    return found


def _base_lines(setup: Setup, found: StepMemory, memory: float) -> _Lines:
    """Yields the memory with either frozen base, and which of them this device needs."""
    if setup.model.adapters is None:
        return
    on_gpu = is_gpu(setup.ranks.device)
    needed = {
        name: with_reserve(found.with_base(streams=name == "stream").peak, on_gpu=on_gpu)
        for name in ("resident", "stream")
    }
    fitting = [name for name, each in needed.items() if each <= memory]
    read = found.streaming_reads * setup.config.tokens.batch_accumulation_per_replica / 1e9
    sizes = f"resident {needed['resident'] / 1e9:.2f} GB, stream {needed['stream'] / 1e9:.2f} GB with a reserve"
    verdict = f"{fitting[0]} fits" if fitting else "neither fits"
    yield "", f"model.frozen_base: {sizes}; stream reads {read:.2f} GB from files in each step; {verdict}"


def describe_dry_run(setup: Setup, measured: MeasuredPeak | None) -> None:
    """Prints the predicted memory of a training step, and `measured`, which is None if one process stands for several
    ranks."""
    _show(_dry_run_lines(setup, describe_memory(setup), measured))


def _dry_run_lines(setup: Setup, predicted: StepMemory, measured: MeasuredPeak | None) -> _Lines:
    if measured is None:
        start = f"torchrun --nproc_per_node={setup.ranks.dimensions.size} -m sftron train --config FILE --dry-run"
        yield "dry run", f"all checks that need no weights passed; nothing was written. {start} measures a step"
        return
    for what, found, expected in (
        ("tensors", measured.tensors, float(predicted.peak)),
        ("growth of the process", measured.resident, GROWTH_OF_TENSORS * predicted.peak),
    ):
        if found is not None:
            share = f"{found / expected:.0%} of the {expected / 1e9:.2f} GB predicted"
            yield "", f"measured: {what} {found / 1e9:.2f} GB, {share}"
    yield _OUTCOME, "all checks passed; nothing was trained or written"


def describe_settings(changed: Sequence[Change], *, is_done: bool) -> None:
    """Prints the keys whose values differ from the checkpoint's."""
    if changed:
        which = "the run is complete, so they change no step" if is_done else f"from step {changed[0].step} on"
        _show([("settings", f"have changed since the checkpoint; {which}:"), *(("", f"  {each}") for each in changed)])


def warn_of_busy_cores(wall: float, processor: float) -> None:
    """Warns if the first step waited for processor cores.

    Args:
        wall, processor: The step's duration, and the processor time of all threads of the process, in seconds. On idle
            cores, the second number is not below the first.
    """
    threads = torch.get_num_threads()
    if threads > 1 and wall > max(_BUSY * processor, processor + 1):
        used = f"{wall:.1f} s, with {processor:.1f} s of processor time: other processes use the cores"
        wait = f"{threads} threads wait for each other. Fewer threads may be faster: OMP_NUM_THREADS=1"
        _show([(_WARNING, f"the first step took {used}, and {wait}")])
