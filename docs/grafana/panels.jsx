// Grafana's panels, from the public components of @grafana/ui.
import {
  applyFieldOverrides,
  DataLinksContext,
  FieldColorModeId,
  FieldConfigOptionsRegistry,
  FieldType,
  getFieldDisplayValues,
  identityOverrideProcessor,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
} from '@grafana/data';
import { BigValue, PanelChrome, TimeSeries, useTheme2, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { useEffect, useLayoutEffect, useRef, useState } from 'react';
import { lastValueFrom } from 'rxjs';

import { runTarget } from './prometheus';

standardTransformersRegistry.setInit(() => Object.values(standardTransformers));

// What Grafana's panel "timeseries" uses where a dashboard has no value.
const TIME_SERIES = {
  axisColorMode: 'text',
  axisPlacement: 'auto',
  barAlignment: 0,
  drawStyle: 'line',
  fillOpacity: 0,
  gradientMode: 'none',
  lineInterpolation: 'linear',
  lineWidth: 1,
  pointSize: 5,
  scaleDistribution: { type: 'linear' },
  showPoints: 'auto',
  spanNulls: false,
  thresholdsStyle: { mode: 'off' },
};

// The field settings that these panels read, each applied unchanged.
const SETTINGS = new FieldConfigOptionsRegistry(() => [
  ...['unit', 'decimals', 'min', 'max', 'displayName', 'links', 'color', 'thresholds'].map((name) => register(name)),
  ...[...Object.keys(TIME_SERIES), 'stacking'].map((name) => register(name, true)),
]);

function register(name, isCustom = false) {
  const id = isCustom ? `custom.${name}` : name;
  return { id, path: name, isCustom, process: identityOverrideProcessor, shouldApply: () => true };
}

/** Run a panel's queries and transformations, and apply its field settings. */
async function load(panel, dashboard, theme) {
  const { url, range, variables, zone } = dashboard;
  let data = (await Promise.all(panel.targets.map((target) => runTarget(url, target, range, variables)))).flat();
  if (panel.transformations) {
    data = await lastValueFrom(transformDataFrame(panel.transformations, data));
  }
  const isSeries = panel.type === 'timeseries';
  const { defaults } = panel.fieldConfig;
  const fieldConfig = {
    ...panel.fieldConfig,
    defaults: {
      color: { mode: isSeries ? FieldColorModeId.PaletteClassic : FieldColorModeId.Thresholds },
      ...defaults,
      custom: isSeries ? { ...TIME_SERIES, ...defaults.custom } : defaults.custom,
    },
  };
  const replaceVariables = (text) => text;
  return applyFieldOverrides({
    data,
    fieldConfig,
    replaceVariables,
    theme,
    timeZone: zone,
    fieldConfigRegistry: SETTINGS,
  });
}

/** A panel in its frame, at its place on the grid. `onReady` is called when it is drawn. */
export function Panel({ panel, width, height, dashboard, onReady }) {
  const theme = useTheme2();
  const [frames, setFrames] = useState();
  useEffect(() => {
    load(panel, dashboard, theme).then(setFrames);
  }, []);
  useEffect(() => {
    if (frames) {
      onReady();
    }
  }, [frames]);
  const Content = { stat: Stat, table: TablePanel, timeseries: Course }[panel.type];
  return (
    <PanelChrome
      title={panel.title}
      description={panel.description}
      width={width}
      height={height}
      padding={panel.type === 'table' ? 'none' : 'md'}
    >
      {(innerWidth, innerHeight) => {
        if (!frames) {
          return null;
        }
        if (
          !frames.some((frame) => frame.fields.some((field) => field.type === FieldType.number && field.values.length))
        ) {
          return <div className="no-data">No data</div>;
        }
        return <Content panel={panel} frames={frames} width={innerWidth} height={innerHeight} dashboard={dashboard} />;
      }}
    </PanelChrome>
  );
}

function Course({ panel, frames, width, height, dashboard }) {
  return (
    <TimeSeries
      frames={frames}
      legend={panel.options.legend}
      structureRev={1}
      timeRange={dashboard.range}
      timeZone={dashboard.zone}
      width={width}
      height={height}
    >
      {(config) => <Marks config={config} marks={dashboard.marks} />}
    </TimeSeries>
  );
}

/** Draw the annotations as Grafana does: a dashed line and a triangle below it. */
function Marks({ config, marks }) {
  const theme = useTheme2();
  useLayoutEffect(() => {
    config.addHook('draw', (plot) => {
      const { ctx, bbox } = plot;
      for (const { time, color } of marks) {
        const x = plot.valToPos(time, 'x', true);
        ctx.save();
        ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(color);
        ctx.lineWidth = 2;
        ctx.setLineDash([5, 5]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.beginPath();
        ctx.moveTo(x, bbox.top + bbox.height);
        ctx.lineTo(x - 6, bbox.top + bbox.height + 7);
        ctx.lineTo(x + 6, bbox.top + bbox.height + 7);
        ctx.fill();
        ctx.restore();
      }
    });
  }, [config]);
  return null;
}

function Stat({ panel, frames, width, height, dashboard }) {
  const theme = useTheme2();
  const { options, fieldConfig } = panel;
  const values = getFieldDisplayValues({
    fieldConfig,
    reduceOptions: options.reduceOptions,
    replaceVariables: (text) => text,
    theme,
    data: frames,
    sparkline: options.graphMode !== 'none',
    timeZone: dashboard.zone,
  });
  return (
    <VizRepeater
      getValues={() => values}
      source={frames}
      orientation={options.orientation}
      width={width}
      height={height}
      itemSpacing={3}
      minVizWidth={0}
      minVizHeight={0}
      getAlignmentFactors={() => ({})}
      autoGrid
      renderCounter={0}
      renderValue={({ value, width: itemWidth, height: itemHeight, count }) => (
        <BigValue
          value={count === 1 ? { ...value.display, title: undefined } : value.display}
          sparkline={value.sparkline ? { ...value.sparkline, timeRange: dashboard.range } : undefined}
          count={count}
          colorMode={options.colorMode}
          graphMode={options.graphMode}
          justifyMode={options.justifyMode}
          textMode={options.textMode}
          wideLayout={options.wideLayout}
          width={itemWidth}
          height={itemHeight}
          theme={theme}
        />
      )}
    />
  );
}

function TablePanel({ frames, width, height, dashboard }) {
  return <TableNG data={frames[0]} width={width} height={height} timeRange={dashboard.range} cellHeight="sm" />;
}
