"""A comparison as files: report.html, report.json and plots/*.png."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from sftron.report.chart_images import write_images
from sftron.report.charts import NUM_COLORS, chart_html, legend_html
from sftron.report.page import escaped, page
from sftron.sweep.comparison import Comparison, as_json
from sftron.sweep.wording import effect_words, spread_words

_LIKE_WITH_LIKE = (
    "A run that trains completions only and one that trains every token have losses over different tokens, which say "
    "nothing about each other. Compare the loss of the answers: the same tokens for all. With documents that see each "
    "other, even that is read with the neighbours in view; the evaluation loss is not, and is the fairest."
)


def write_comparison(comparison: Comparison, folder: Path, say: Callable[[str], None]) -> Path:
    """Returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.write_text(comparison_page(comparison), encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(as_json(comparison), indent=1) + "\n", encoding="utf-8")
    groups = comparison.groups
    try:
        write_images(
            comparison.charts,
            folder / "plots",
            words=[group.words for group in groups],
            letters=[group.letter for group in groups],
        )
    except ImportError:
        say("no PNGs    matplotlib is not installed: pip install 'sftron[plots]'; report.html has the same charts")
    return path


def comparison_page(comparison: Comparison) -> str:
    """The page as text."""
    body = _effects(comparison) + _figures(comparison) + _charts(comparison) + _runs(comparison)
    return page(comparison.title, header=_verdict(comparison), body=body, styles=("charts.css",))


def _verdict(comparison: Comparison) -> str:
    num_completed = sum(run.status == "completed" for run in comparison.runs)
    is_whole = num_completed == comparison.num_expected
    kind, word = ("good", "complete") if is_whole else ("bad", "not complete")
    facts = f"{num_completed} of {comparison.num_expected} runs completed"
    best = f"; {comparison.best_words}" if comparison.best_words else ""
    return f'<p class="verdict {kind}"><b>{word}</b> <span>{escaped(facts + best)}</span></p>'


def _effects(comparison: Comparison) -> str:
    if not comparison.effects:
        return ""
    rows = "".join(
        f"<tr><th>{escaped(comparison.setting_words(effect))}</th><td>{escaped(effect.figure.title)}</td>"
        f'<td class="n">{escaped(effect_words(effect))}</td></tr>\n'
        for effect in comparison.effects
    )
    return (
        '<section><h2>What each setting changed</h2><p class="facts">Runs that are alike in all else, the seed '
        "included, in pairs; mean and standard deviation over the pairs. Speeds are compared step by step on the same "
        f'packs.</p><div class="wide"><table><thead><tr><th>setting</th><th>figure</th><th class="n">change</th></tr>'
        f"</thead><tbody>\n{rows}</tbody></table></div></section>\n"
    )


def _figures(comparison: Comparison) -> str:
    heads = "".join(f'<th class="n">{escaped(figure.title)}</th>' for figure in comparison.figures)
    rows = []
    for style, group in enumerate(comparison.groups):
        cells = (comparison.spread_of(group, figure) for figure in comparison.figures)
        written = (
            '<td class="n">not recorded</td>'
            if found is None
            else f'<td class="n">{escaped(spread_words(found, figure))}</td>'
            for found, figure in zip(cells, comparison.figures, strict=True)
        )
        name = f'<th class="s{style % NUM_COLORS}"><b>{escaped(group.letter)}</b> {escaped(group.words)}</th>'
        rows.append(f"<tr>{name}{''.join(written)}</tr>\n")
    return (
        '<section><h2>Final figures</h2><p class="facts">Mean ± standard deviation over seeds (number of completed '
        "runs). Training losses over the last tenth of the steps, at least five; speeds are the median step's. "
        f'{_LIKE_WITH_LIKE}</p><div class="wide figures"><table><thead><tr><th>runs</th>{heads}</tr></thead><tbody>\n'
        f"{''.join(rows)}</tbody></table></div></section>\n"
    )


def _charts(comparison: Comparison) -> str:
    if not comparison.charts:
        return ""
    legend = legend_html([group.words for group in comparison.groups], [group.letter for group in comparison.groups])
    charts = "".join(chart_html(chart) for chart in comparison.charts)
    return (
        "<section><h2>Curves</h2>"
        '<p class="facts">Means over seeds, with each run thin behind them, as far as all completed runs go.</p>\n'
        f'{legend}<div class="charts">\n{charts}</div></section>\n'
    )


def _runs(comparison: Comparison) -> str:
    rows = "".join(
        _row(
            f'<b class="s{style % NUM_COLORS}">{escaped(group.letter)}</b>',
            escaped(run.name),
            escaped(run.status),
            f"{run.last_step:,}",
            escaped(run.error),
        )
        for style, group in enumerate(comparison.groups)
        for run in group.runs
    )
    return (
        '<section><h2>Runs</h2><div class="wide"><table><thead><tr><th></th><th>run</th><th>status</th><th>steps</th>'
        f"<th>error</th></tr></thead><tbody>\n{rows}</tbody></table></div></section>\n"
    )


def _row(*cells: str) -> str:
    return f"<tr>{''.join(_cells(cells))}</tr>\n"


def _cells(cells: Iterable[str]) -> Iterable[str]:
    return (f'<td class="text">{cell}</td>' for cell in cells)
