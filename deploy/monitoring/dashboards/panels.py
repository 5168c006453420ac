"""Panels for queries, and their layout on a grid of 24 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models import dashboard as board
from grafana_foundation_sdk.models import prometheus as promql

from .queries import Query

COLUMNS = 24
SOURCE = board.DataSourceRef(type_val="prometheus", uid="$datasource")

Panel = Any
Queries = Query | Sequence[Query]


GREEN = "green"
ORANGE = "orange"
RED = "red"
PLAIN = "text"

Steps = Sequence[tuple[float, str]]
"""Thresholds with their colours; values below the first threshold are plain."""


def show_number(
    title: str,
    queries: Queries,
    *,
    unit: str = "short",
    decimals: int | None = None,
    steps: Steps = (),
    about: str,
) -> Panel:
    """Return a panel with the last value as a number, in the colour of its threshold, above a graph."""
    panel = stat.Panel().title(title).description(about).unit(unit).datasource(SOURCE)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    thresholds = [board.Threshold(value=None, color=PLAIN), *(board.Threshold(value, color) for value, color in steps)]
    panel = panel.thresholds(dashboard.ThresholdsConfig().mode(board.ThresholdsMode.ABSOLUTE).steps(thresholds))
    if decimals is not None:
        panel = panel.decimals(decimals)
    return _with(panel, queries)


def show_course(
    title: str,
    queries: Queries,
    *,
    unit: str = "short",
    decimals: int | None = None,
    stacked: bool = False,
    highest: float | None = None,
    link: dashboard.DashboardLink | None = None,
    about: str,
) -> Panel:
    """Return a panel with lines over time. ``link``: the target of a click on a line."""
    panel = timeseries.Panel().title(title).description(about).unit(unit).datasource(SOURCE).min(0)
    if unit in ("none", "sci"):  # a loss may be negative
        panel = timeseries.Panel().title(title).description(about).unit(unit).datasource(SOURCE)
    if highest is not None:
        panel = panel.max(highest)
    if decimals is not None:
        panel = panel.decimals(decimals)
    legend = common.VizLegendOptions().show_legend(True).display_mode(models.LegendDisplayMode.TABLE)
    panel = panel.legend(legend.placement(models.LegendPlacement.BOTTOM).calcs(["lastNotNull", "max"]))
    if link is not None:
        panel = panel.data_links([link])
    if stacked:
        panel = panel.fill_opacity(40).stacking(common.StackingConfig().mode(models.StackingMode.NORMAL))
    return _with(panel, queries)


def show_rows(title: str, query: Query, *, unit: str, about: str) -> Panel:
    """Return a heatmap with a row for each series of the query."""
    panel = heatmap.Panel().title(title).description(about).unit(unit).datasource(SOURCE).calculate(False)
    return _with(panel, query)


def show_table(
    title: str,
    queries: Sequence[Query],
    *,
    units: dict[str, str],
    links: dict[str, dashboard.DashboardLink],
    about: str,
) -> Panel:
    """Return a table with a row per job and a column per query. ``links``: by column."""
    panel = table.Panel().title(title).description(about).datasource(SOURCE)
    names: dict[str, Any] = {"Time": True}
    renamed = {}
    for index, query in enumerate(queries):
        reference = chr(ord("A") + index)
        renamed[f"Value #{reference}"] = query.legend
        built = prometheus.Dataquery().expr(query.expr).ref_id(reference).instant()
        panel = panel.with_target(built.format(promql.PromQueryFormat.TABLE).datasource(SOURCE))
    for column, unit in units.items():
        panel = panel.override_by_name(column, [board.DynamicConfigValue(id_val="unit", value=unit)])
    for column, link in links.items():
        panel = panel.override_by_name(column, [board.DynamicConfigValue(id_val="links", value=[link.build()])])
    merged = board.DataTransformerConfig(id_val="merge", options={})
    tidy = board.DataTransformerConfig(id_val="organize", options={"excludeByName": names, "renameByName": renamed})
    return panel.transformations([merged, tidy])


def _with(panel: Panel, queries: Queries) -> Panel:
    for index, query in enumerate([queries] if isinstance(queries, Query) else queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + index)).datasource(SOURCE)
        target = target.instant() if query.once else target.range()
        panel = panel.with_target(target.legend_format(query.legend) if query.legend else target)
    return panel


def lay_out(builder: dashboard.Dashboard, rows: Sequence[tuple[str, int, Sequence[Panel]]]) -> dashboard.Dashboard:
    """Add rows: a heading, a height, and panels of equal width. A panel's id is its number."""
    y = 0
    number = 0
    for heading, height, panels in rows:
        builder = builder.with_row(dashboard.Row(heading).grid_pos(board.GridPos(h=1, w=COLUMNS, x=0, y=y)))
        y += 1
        for index, panel in enumerate(panels):
            left = COLUMNS * index // len(panels)
            right = COLUMNS * (index + 1) // len(panels)
            number += 1
            place = board.GridPos(h=height, w=right - left, x=left, y=y)
            builder = builder.with_panel(panel.id(number).grid_pos(place))
        y += height
    return builder
