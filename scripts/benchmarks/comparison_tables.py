"""Results of a list of runs as Markdown, beside what the mTuner paper reports."""

from collections.abc import Iterable, Iterator, Sequence

from mtuner_jax.numbers import tables
from scripts.benchmarks import ablations
from scripts.benchmarks.run_lists import Case, Kind, ListedRun
from scripts.benchmarks.run_records import Progress, Record, RunEvent, State

# Of the paper, 8 x A100-PCIe-40GB: GB/s of a gather's output by local ratio, changes of
# communication time by filling, and of speed by a tail on 70B.
PAPER_GATHER_GB_S = {8: 16.0, 4: 26.0, 2: 40.0}
PAPER_FILLING = {
    ablations.NOTHING_KEPT: "",
    ablations.ONE_RATIO: "-10 %",
    ablations.PROGRESSIVE: "-41 %",
}
PAPER_TAIL = "+12 %"
PLANNED, STATIC = "planned", "static"
_NOT_RUN = "not run"
_NOT_MEASURED = "not measured"
_LINE_CHARS = 160


def markdown(progress: Progress) -> str:
    """All tables; what has no result is listed, not left out."""
    parts = [
        _heading(progress),
        "## Gathers\n\n" + _links(progress),
        "## Planned against static plans and FSDP2 + Liger\n\n" + _cases(progress),
        "## Predicted against measured\n\n" + _predictions(progress),
        "## Filling the memory between steps\n\n" + _fillings(progress),
        "## Tail in parts of the batch\n\n" + _tails(progress),
        "## PyTorch FSDP2 + Liger\n\n" + _peers(progress),
        "## Without a result\n\n" + _missing(progress),
    ]
    return "\n".join(parts)


def line(record: Record) -> str:
    """An event for the terminal."""
    text = f"{record.run}: {record.event}"
    if record.event is not RunEvent.STARTED:
        text += f" after {record.seconds:.0f} s"
    if "step_ms" in record.result:
        found = record.result
        text += f", {found['step_ms']} ms, {found['compiled_gib']} GiB compiled"
    if record.error:
        text += f": {_short(record.error)}"
    return text


def _heading(progress: Progress) -> str:
    listed = progress.listed
    results = [progress.result(run) for run in listed.runs]
    devices = sorted({r["device"] for r in results if "device" in r})
    versions = sorted({r["versions"] for r in results if "versions" in r})
    times = sorted(r.time[:10] for r in progress.records)
    what = ", ".join((*devices, *versions)) or "nothing was run yet"
    days = f", {times[0]} to {times[-1]}" if times else ""
    settings = [
        f"- **{s.name}**: NCCL_P2P_DISABLE={s.environment['NCCL_P2P_DISABLE']}, "
        f"{s.pool_gib:g} GiB per device{'' if s.capped else ' (no cap)'}; planned with "
        f"the figures of {s.hardware}\n"
        for s in listed.settings
    ]
    return (
        f"# Comparison on {listed.num_devices} devices ({listed.mesh})\n\n"
        f"{what}{days}. List {listed.digest} of "
        "`scripts/benchmarks/server_runs.py`; written by "
        "its step `table`. LoRA r=16 on all linears, random weights and tokens, one "
        f"run each.\n\n{''.join(settings)}"
    )


def _links(progress: Progress) -> str:
    """A row for each axis: what a gather at that local ratio brings."""
    body: list[tuple[str, ...]] = []
    for run in _of_kind(progress, Kind.LINKS):
        found = progress.result(run).get("axes", {})
        if not found:
            body.append((run.setting, "", _status(progress, run), "", ""))
        for axis in found.values():
            group = axis["group"]
            received, seconds = axis["received_bytes_and_s"][-1]
            rate = received / seconds / 1e9
            rates = (f"{rate:.3g}", f"{rate * group / (group - 1):.3g}")
            paper = (
                f"{PAPER_GATHER_GB_S[group]:g}" if group in PAPER_GATHER_GB_S else ""
            )
            body.append((run.setting, f"1/{group}", *rates, paper))
    head = "setting | local ratio | received GB/s: | output GB/s: | paper, PCIe, GB/s:"
    note = "\nThe largest message; the paper's figures are taken as output over time.\n"
    return tables.markdown(head, body) + note


def _cases(progress: Progress) -> str:
    body = []
    for case, runs in _by_case(progress).items():
        planned = _with_role(runs, PLANNED)
        statics = [run for run in runs if any(r.startswith(STATIC) for r in run.roles)]
        if planned is None or not statics:
            continue
        ms = _ms(progress, planned)
        static, static_ms = _fastest(progress, statics)
        predicted = min(run.predicted_ms for run in statics) / planned.predicted_ms
        peer, peer_tokens = _best_peer(progress, case)
        tokens = 1e3 * case.global_batch_size * case.max_length / ms if ms else 0.0
        name = next((r for r in static.roles if r.startswith(STATIC)), "")
        times = [
            _number(value, 1) or _status(progress, run)
            for value, run in ((ms, planned), (static_ms, static))
        ]
        gains = (_number(static_ms / ms if ms else 0.0, 2), f"{predicted:.2f}")
        peers = (_number(peer_tokens, 0) or _NOT_RUN, peer)
        ratio = _number(tokens / peer_tokens if peer_tokens else 0.0, 2)
        which = name.removeprefix(STATIC).strip()
        first = (case.setting, _label(case), *times, which, *gains)
        body.append((*first, _number(tokens, 0), *peers, ratio))
    head = (
        "setting | case | planned, ms: | best static, ms: | which | gain: | predicted: "
        "| planned, tokens/s: | FSDP2 + Liger, tokens/s: | mode, rows per device "
        "| ratio:"
    )
    note = (
        "\nThe faster of the measured static plans counts. The peer is in its fastest "
        "mode with at most as many rows per device as the case has: with fewer it "
        "would accumulate, at the same speed. Paper, PCIe: +28 % "
        "over DeepSpeed on average.\n"
    )
    return tables.markdown(head, body) + note


def _predictions(progress: Progress) -> str:
    body = []
    for run in _of_kind(progress, Kind.STEP):
        found = progress.result(run)
        if not found:
            continue
        low, high = found["step_ms_min_max"]
        ms, gib = found["step_ms"], found["compiled_gib"]
        peak = _number(found.get("measured_gib", 0.0), 2)
        time_ratio = _number(run.predicted_ms / ms, 3)
        memory_ratio = _number(run.predicted_gib / gib if gib else 0.0, 3)
        times = (f"{ms} ({low} - {high})", found["steps"], run.predicted_ms, time_ratio)
        body.append((run.name, *times, gib, peak, run.predicted_gib, memory_ratio))
    head = (
        "run | measured ms (min - max): | steps: | predicted ms: | ratio: | "
        "compiled GiB: | measured peak GiB: | predicted GiB: | ratio:"
    )
    note = "\nNo measured peak: the process had held more for a run before it.\n"
    return tables.markdown(head, body) + note


def _fillings(progress: Progress) -> str:
    body = []
    for case, runs in _by_case(progress).items():
        fillings = {name: _with_role(runs, name) for name in PAPER_FILLING}
        nothing = fillings[ablations.NOTHING_KEPT]
        if nothing is None:
            continue
        before_ms = progress.result(nothing).get("communication_ms", 0.0)
        for name, run in fillings.items():
            if run is None:
                continue
            found = progress.result(run)
            ms = _number(_ms(progress, run), 1) or _status(progress, run)
            took_ms = found.get("communication_ms", 0.0)
            took = _number(took_ms, 1) or (_NOT_MEASURED if found else "")
            exposed = _number(found.get("exposed_ms", 0.0), 1)
            predicted = _change(
                run.predicted_communication_ms, nothing.predicted_communication_ms
            )
            changes = (_change(took_ms, before_ms), predicted, PAPER_FILLING[name])
            label = f"{case.setting} {_label(case)}"
            body.append((label, name, ms, took, exposed, *changes))
    head = (
        "case | filled with | step ms: | communication ms: | exposed ms: | change: | "
        "predicted: | paper:"
    )
    note = (
        "\nSame cut of the batch, tables and adapters; layer inputs are all that is "
        "saved. Communication is that of one traced step, all collectives.\n"
    )
    return tables.markdown(head, body) + note


def _tails(progress: Progress) -> str:
    body = []
    for case, runs in _by_case(progress).items():
        without = _with_role(runs, ablations.NO_TAIL)
        tail = _with_role(runs, ablations.TAIL)
        if without is None or tail is None:
            continue
        times = [_ms(progress, run) for run in (without, tail)]
        texts = [
            _number(ms, 1) or _status(progress, run)
            for ms, run in zip(times, (without, tail), strict=True)
        ]
        changes = (_change(*times), _change(without.predicted_ms, tail.predicted_ms))
        label = f"{case.setting} {_label(case)}"
        body.append((label, *texts, *changes, PAPER_TAIL))
    head = "case | without, ms: | with, ms: | faster: | predicted: | paper, 70B:"
    note = "\nBoth without layer inputs on the host, which the paper does not have.\n"
    return tables.markdown(head, body) + note


def _peers(progress: Progress) -> str:
    body = []
    for run in _of_kind(progress, Kind.PEER):
        found = progress.result(run)
        first = (run.setting, f"{run.case.shape}, {run.max_length}", *run.roles[:1])
        for one in found.get("batches", ()):
            numbers = (f"{one[name]:,.0f}" for name in ("step_ms", "tokens_per_s"))
            body.append((*first, f"{one['batch']:g}", *numbers, one["peak_gib"]))
        if found.get("first_not"):
            body.append((*first, f"{found['first_not']:g}", "out of memory", "", ""))
    head = "setting | model, tokens | mode | rows per device: | ms: | tokens/s: | GiB:"
    return tables.markdown(head, body)


def _missing(progress: Progress) -> str:
    """What failed, what fits nowhere, and what was not run, by setting and model."""
    texts: list[str] = []
    not_run: dict[str, list[str]] = {}
    for run in progress.listed.runs:
        state = progress.state(run)
        if state is State.FAILED:
            texts.append(f"- {run.name}: failed, {_short(progress.error(run))}")
        elif state is not State.DONE:
            name = run.name.split("/", 2)[-1]
            cut_off = " (cut off twice)" if state is State.CUT_OFF else ""
            group = f"{run.setting} {run.case.shape}"
            not_run.setdefault(group, []).append(name + cut_off)
    texts += [
        f"- {case}: no plan fits ({why})" for case, why in progress.listed.unplanned
    ]
    texts += [
        f"- {_NOT_RUN}: {group}: {', '.join(names)}" for group, names in not_run.items()
    ]
    return "\n".join(texts or ["Nothing."]) + "\n"


def _of_kind(progress: Progress, kind: Kind) -> Iterator[ListedRun]:
    return (run for run in progress.listed.runs if run.kind is kind)


def _by_case(progress: Progress) -> dict[Case, list[ListedRun]]:
    found: dict[Case, list[ListedRun]] = {}
    for run in _of_kind(progress, Kind.STEP):
        found.setdefault(run.case, []).append(run)
    return found


def _with_role(runs: Iterable[ListedRun], role: str) -> ListedRun | None:
    return next((run for run in runs if role in run.roles), None)


def _ms(progress: Progress, run: ListedRun) -> float:
    return progress.result(run).get("step_ms", 0.0)


def _fastest(progress: Progress, runs: Sequence[ListedRun]) -> tuple[ListedRun, float]:
    """The fastest run with a result; the one predicted fastest if there is none."""
    timed = [(ms, run.name, run) for run in runs if (ms := _ms(progress, run))]
    if timed:
        ms, _, run = min(timed)
        return run, ms
    return min(runs, key=lambda run: run.predicted_ms), 0.0


def _best_peer(progress: Progress, case: Case) -> tuple[str, float]:
    """(mode and batch, tokens/s) of the fastest with no more rows than the case."""
    rows_per_device = case.global_batch_size / progress.listed.num_devices
    found = [("", 0.0)]
    for run in _of_kind(progress, Kind.PEER):
        if run.case[:3] != case[:3]:
            continue
        found += [
            (f"{run.roles[0]}, {one['batch']:g}", one["tokens_per_s"])
            for one in progress.result(run).get("batches", ())
            if one["batch"] <= max(rows_per_device, 1)
        ]
    return max(found, key=lambda pair: pair[1])


def _status(progress: Progress, run: ListedRun) -> str:
    """Why there is no result; a run is only called failed if it was."""
    state = progress.state(run)
    if state is State.FAILED:
        return "failed"
    return "not run (cut off twice)" if state is State.CUT_OFF else _NOT_RUN


def _label(case: Case) -> str:
    return f"{case.shape}, {case.global_batch_size} x {case.max_length}"


def _change(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.0f} %" if value and base else ""


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if value else ""


def _short(text: str) -> str:
    """An error in one line."""
    words = " ".join(text.split())
    return words if len(words) <= _LINE_CHARS else f"{words[:_LINE_CHARS]}..."
