"""The tables of README and docs as Markdown, each made from one result file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def info(result: dict[str, Any]) -> str:
    return "\n".join(["```", "$ kvcellar info exact.kvc", *result["info"]["lines"], "```"])


def results(result: dict[str, Any]) -> str:
    """`exact` on the demo model, each figure beside what it is to be compared with, all from one run."""
    sizes, restore, memory = result["sizes"], result["restore"], result["memory"]
    blosc2 = restore[result["blosc2_fastest"]]
    ours = restore["exact"]
    mega = 1e6
    rows = [
        ("recipe `exact`", "figure", "beside it"),
        ("---", "---", "---"),
        (
            "file",
            f"{sizes['exact'] / mega:.2f} MB, {result['cache']['ratio_16bit']:.2f} x 16-bit",
            f"zstd-3 {sizes['zstd-3'] / mega:.2f} MB, Blosc2 shuffle + zstd {sizes['blosc2'] / mega:.2f} MB",
        ),
        (
            "restore of 2,000 tokens",
            f"{1000 * ours['median_s']:.0f} ms, {ours['mb_per_s'] / 1000:.2f} GB/s",
            f"Blosc2 decode {blosc2['mb_per_s'] / 1000:.2f} GB/s, "
            f"clone {restore['clone']['mb_per_s'] / 1000:.2f} GB/s, "
            f"fastest prefill {result['prefill']['fastest_s']:.2f} s",
        ),
        ("save", f"{1000 * result['save']['median_s']:.0f} ms", "synced to disk"),
        (
            "peak extra memory, save / restore",
            f"{memory['save_extra'] / mega:.1f} / {memory['restore_extra'] / mega:.1f} MB",
            f"two blocks of cache: {memory['limit'] / mega:.1f} MB",
        ),
        (
            "reading 10 tokens of one layer",
            f"{result['range']['reading'] / 1000:.0f} kB read",
            f"their part {result['range']['part'] / 1000:.0f} kB, the file {sizes['raw'] / mega:.0f} MB raw",
        ),
        ("`kvcellar info`", f"{result['info']['median_s']:.2f} s", "the whole command"),
    ]
    machine = result["machine"]
    where = (
        f"{result['cache']['tokens']:,} tokens of standard-library text through SmolLM2-135M-Instruct (bfloat16); "
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, commit {machine['commit']}. "
        "Medians; from `benchmarks/results/exact.json`, made by `make bench`."
    )
    return _page(where, rows)


def quality(result: dict[str, Any], speed: dict[str, Any]) -> str:
    """Recipes, peers and the floor over all texts of the bench, smallest divergence first; seconds from a run of their
    own on a quiet machine."""
    quicker = {row["recipe"]: row["restore_speedup"] for row in speed["rows"] if row["text"] == "all"}
    rows = sorted((row for row in result["rows"] if row["text"] == "all"), key=lambda row: row["kl"])
    table = [
        ("", "B/token, whole file", "x 16-bit", "KL, nats [95 %]", "Δppl", "context kept (RCB)", "prefill ÷ restore"),
        ("---", *["---:"] * 6),
    ]
    raw = 2 * result["numbers_per_token"]
    for row in rows:
        size, low_high = row["file_bytes_per_token"], row["kl_ci"]
        interval = f" [{low_high[0]:.2g}, {low_high[1]:.2g}]" if low_high and row["kl"] else ""
        ours = ":" not in row["recipe"]
        table.append(
            (
                f"**`{row['recipe']}`**" if ours else row["recipe"],
                "–" if size is None else f"{size:,.0f}",
                "–" if size is None else f"{raw / size:.1f}",
                f"{row['kl']:.2g}{interval}",
                f"{100 * row['dppl']:+.2f} %",
                "–" if row["rcb"] is None else f"{row['rcb']:.2f}",
                f"{quicker[row['recipe']]:.1f}" if ours and quicker.get(row["recipe"]) else "–",
            )
        )
    machine, windows = result["machine"], len(result["windows"])
    using = [r for r in rows if r.get("profile") and ":" not in r["recipe"]]
    sharing = {r["profile"]: [s["recipe"] for s in using if s["profile"] == r["profile"]] for r in using}
    weights = {r["profile"]: (r["profile_bytes"], r["calibration_tokens"]) for r in using}
    profiles = [
        f"`{'`, `'.join(names)}` {weights[key][0] / 1e6:.0f} MB from {weights[key][1]:,} tokens"
        for key, names in sharing.items()
    ]
    where = (
        f"{windows} windows of {rows[0]['tokens']:,} + 384 tokens, one a document (encyclopedia, essays, docs, "
        f"code), SmolLM2-135M-Instruct; {machine['cpu']}, {machine['cores']} cores, commit {machine['commit']}; "
        "from `benchmarks/results/bench-lossy.json`. `floor:empty` keeps only the first 4 and the last 32 tokens. "
        "What is worse than it compresses nothing. Profiles are made once per model by `kvcellar calibrate`: "
        f"{'; '.join(profiles)} of other text. Seconds from `benchmarks/results/bench-speed.json`, "
        f"{len(speed['windows'])} windows, commit {speed['machine']['commit']}."
    )
    return _page(where, table)


def study(result: dict[str, Any]) -> str:
    """The quantizer study beside what was published, and its differences with intervals."""
    published = {row["config"]: row for row in result["published"]}
    table = [
        ("codebooks and stages", "line", "grid", "ring", "KL", "Δppl", "second half", "RCB", "published Δppl"),
        ("---", *["---:"] * 8),
    ]
    for row in result["rows"]:
        codes, known = row["payload_by_code"], published.get(row["recipe"])
        table.append(
            (
                row["recipe"],
                *(f"{codes[code]:,.0f}" for code in ("line", "grid", "ring")),
                f"{row['kl']:.3g}",
                f"{100 * row['dppl']:+.1f} %",
                f"{100 * row['dppl_second_half']:+.1f} %",
                "–" if row["rcb"] is None else f"{row['rcb']:.2f}",
                f"{100 * known['dppl']:+.1f} %" if known else "",
            )
        )
    floor, windows = result["floor"], len(result["windows"])
    lines = [
        f"{windows} windows of {result['rows'][0]['tokens']:,} + 384 tokens, SmolLM2-135M-Instruct, commit "
        f"{result['machine']['commit']}; from `benchmarks/results/quantizers.json`, by `kvcellar bench quantizers`. "
        f"Bytes that code a coarse token, its id included, in files of each code; ∅ has KL {floor['kl']:.3g} and "
        f"Δppl {100 * floor['dppl']:+.1f} %.",
        "",
        *("| " + " | ".join(row) + " |" for row in table),
        "",
        "Differences in KL on the same windows, 95 % intervals over documents:",
        "",
    ]
    for each in result["differences"]:
        low, high = each["kl"]["ci"] or (float("nan"), float("nan"))
        lines.append(f"- {each['better']} less {each['than']}: {each['kl']['value']:+.3g} [{low:+.3g}, {high:+.3g}]")
    return "\n".join(lines)


def articles(result: dict[str, Any]) -> str:
    """Recipes, peers and floors on windows of one kind of text, with the intervals that goals are held against."""
    table = [
        ("", "payload, B/token", "whole file", "KL [95 %]", "Δppl", "RCB [95 %]"),
        ("---", *["---:"] * 5),
    ]
    for row in sorted(result["rows"], key=lambda row: row["kl"]):
        payload, size = row["payload_bytes_per_token"], row["file_bytes_per_token"]
        table.append(
            (
                f"`{row['recipe']}`",
                "–" if not payload else f"{payload:,.1f}",
                "–" if not size else f"{size:,.0f}",
                _with_interval(row, "kl", ".4f"),
                f"{100 * row['dppl']:+.2f} %",
                _with_interval(row, "rcb", ".3f"),
            )
        )
    where = (
        f"{len(result['windows'])} articles of WikiText-2's test text, {result['rows'][0]['tokens']:,} + 384 tokens "
        f"each, commit {result['machine']['commit']}; from `benchmarks/results/{result['file']}`."
    )
    return _page(where, table)


def _with_interval(row: dict[str, Any], name: str, form: str) -> str:
    value, ends = row[name], row[f"{name}_ci"]
    return "–" if value is None else f"{value:{form}}" + (f" [{ends[0]:{form}}, {ends[1]:{form}}]" if ends else "")


def turbo(result: dict[str, Any]) -> str:
    """TurboQuant as published and as our recipes store it, beside the prototype's rows."""
    table = [
        ("", "payload, B/token", "KL [95 %]", "Δppl", "prototype: payload, KL, Δppl"),
        ("---", *["---:"] * 4),
    ]
    for row in result["rows"]:
        name = f"published, {row['bits']} bits" if row["code"] == "published" else f"`turbo-{row['bits']}`"
        table.append(
            (
                name,
                f"{row['payload_b_per_token']:,.0f}",
                _with_interval(row, "kl", ".4f"),
                f"{100 * row['delta_ppl']:+.1f} %",
                f"{row['design_payload']:,}, {row['design_kl']:.3f}, {100 * row['design_dppl']:+.1f} %",
            )
        )
    where = (
        f"The prototype's eight windows, commit {result['machine']['commit']}; from "
        f"`benchmarks/results/{result['file']}`, by `benchmarks/baselines/validate_turbo.py`."
    )
    return _page(where, table)


def equal_divergence(result: dict[str, Any]) -> str:
    """Peers' bytes over those of the cellar recipes at the peer's own divergence."""
    table = [("peer", "KL", "payload, B/token", "÷ ours", "whole file, B/token", "÷ ours"), ("---", *["---:"] * 5)]
    for each in result["curve"]:
        ratios = [each["ratio"][f"{of}_bytes_per_token"] for of in ("payload", "file")]
        payload, file = ("–" if ratio is None else f"{ratio:.1f}" for ratio in ratios)
        sizes = [f"{each[f'{of}_bytes_per_token']:,.0f}" for of in ("payload", "file")]
        name = each["recipe"].removeprefix("peer:")
        table.append((f"`{name}`", f"{each['kl']:.3g}", sizes[0], payload, sizes[1], file))
    where = (
        f"{result['curve'][0]['windows']} articles of WikiText-2's test text, 1,024 + 384 tokens each; from "
        f"`benchmarks/results/{result['file']}` and `bench-equal-kl.json`. – is beyond the divergences "
        "of our three recipes."
    )
    return _page(where, table)


def peers(result: dict[str, Any]) -> str:
    """Packaged peers beside figures from elsewhere, measured the same way."""
    setting = result["setting"]
    table = [
        (
            "peer",
            "KL elsewhere",
            "KL here [least, most of a window]",
            "ratio",
            "best tokens alike, elsewhere / here",
            "prefix alone",
        ),
        ("---", *["---:"] * 5),
    ]
    for row in result["rows"]:
        each, alone = row["kl_by_window"], row["kl_of_prefix_alone"]
        table.append(
            (
                f"`{row['peer']}`",
                f"{row['elsewhere']:.2g}",
                f"{row['kl']:.2g} [{min(each):.2g}, {max(each):.2g}]",
                f"{row['ratio']:.2f}{'' if row['within'] else ' (outside)'}",
                f"{row['top1_elsewhere']:.3f} / {row['top1']:.3f}",
                "–" if alone is None else f"{alone:.2g}",
            )
        )
    left_out = "".join(f" Left out: `{name}` ({why})." for name, why in result["left_out"].items())
    where = (
        f"{setting['windows']} windows of {setting['prefix']:,} + {setting['read']} tokens "
        f"({', '.join(result['texts'])}), commit {result['machine']['commit']}; from "
        f"`benchmarks/results/peers_validation.json`.{left_out}"
    )
    return _page(where, table)


def reduced(result: dict[str, Any]) -> str:
    """Reducers by method and kept fraction over all texts, and their KL beside that of `streaming` and `random`."""
    ratios = {(each["method"], each["than"], each["keep"]): each["ratio"] for each in result["comparisons"]}
    table = [
        ("method", "kept", "slots", "memory freed", "KL [95 %]", "RCB", "÷ streaming [95 %]", "÷ random [95 %]"),
        ("---", *["---:"] * 7),
    ]
    rows = [row for row in result["rows"] if row["text"] == "all" and row["kl"] is not None]
    for row in sorted(rows, key=lambda row: (round(row.get("keep") or row["kept"], 2), row["kl"])):
        method, keep = row.get("method", row["recipe"]), row.get("keep") or row["kept"]
        table.append(
            (
                f"`{method}`",
                f"{100 * keep:.0f} %",
                f"{row['slots']:,}" if row.get("slots") else "–",
                f"{100 * row['freed']:.0f} %" if row.get("freed") else "–",
                f"{row['kl']:.4f} [{row['kl_ci'][0]:.4f}, {row['kl_ci'][1]:.4f}]",
                "–" if row["rcb"] is None else f"{row['rcb']:.2f}",
                *(_ratio(ratios.get((method, than, keep))) for than in ("streaming", "random")),
            )
        )
    where = (
        f"{len(result['windows'])} windows of 1,024 + 384 tokens (encyclopedia, essays, docs, code), methods that draw "
        f"with several draws, commit {result['machine']['commit']}; from `benchmarks/results/reduce.json`."
    )
    beside = [
        f"- `{method}` ÷ `{than.removeprefix('peer:')}`: {_ratio(ratio)}"
        for (method, than, _), ratio in ratios.items()
        if than.startswith("peer:") and method == "matching"
    ]
    return "\n".join([_page(where, table), "", *beside])


def _ratio(found: dict[str, Any] | None) -> str:
    if not found or found["value"] is None:
        return "–"
    low, high = found["ci"] or (float("nan"), float("nan"))
    return f"{found['value']:.2f} [{low:.2f}, {high:.2f}]"


def _page(where: str, table: Sequence[Sequence[str]]) -> str:
    return "\n".join([where, "", *("| " + " | ".join(row) + " |" for row in table)])
