// Draws a Grafana dashboard from its JSON and a Prometheus: the grid, the variables and the time range of a dashboard page.
//   ?board=job&prometheus=http://127.0.0.1:9090&from=…&to=…&scrape=15&rows=Progress,Learning&var-ddp_job=gpt
import { createTheme, dateTime, ThemeContext } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import { GlobalStyles, Icon, InlineLabel, PortalContainer, TimeRangePicker } from '@grafana/ui';
import '@fontsource/inter/400.css';
import '@fontsource/inter/500.css';
import { createRoot } from 'react-dom/client';

import { Panel } from './panels';
import { buildVariables, readMarks } from './prometheus';

const CELL_HEIGHT = 30; // pixels, and 8 between cells, as in Grafana
const GAP = 8;

const asked = new URLSearchParams(location.search);

/** Return the panels of the chosen rows, moved up to follow each other. */
function chooseRows(panels, titles) {
  if (!titles) {
    return panels;
  }
  const kept = [];
  let taken = false;
  let up = 0;
  let bottom = 0;
  for (const panel of panels) {
    if (panel.type === 'row') {
      taken = titles.includes(panel.title);
      up = panel.gridPos.y - bottom;
    }
    if (taken) {
      const place = { ...panel.gridPos, y: panel.gridPos.y - up };
      bottom = Math.max(bottom, place.y + place.h);
      kept.push({ ...panel, gridPos: place });
    }
  }
  return kept;
}

function Board({ board, panels, dashboard, width }) {
  const column = (width + GAP) / 24;
  let waiting = panels.filter((panel) => panel.type !== 'row').length;
  const onReady = () => {
    waiting -= 1;
    if (waiting === 0) {
      setTimeout(() => (document.title = 'drawn'), 1000);
    }
  };
  const lowest = Math.max(...panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  return (
    <div className="board">
      <header>
        <h1>{board.title}</h1>
        <TimeRangePicker
          value={dashboard.range}
          timeZone={dashboard.zone}
          onChange={() => {}}
          onChangeTimeZone={() => {}}
          onMoveBackward={() => {}}
          onMoveForward={() => {}}
          onZoom={() => {}}
        />
      </header>
      <div className="variables">
        {board.templating.list
          .filter(({ name }) => asked.get(`var-${name}`))
          .map(({ name, label }) => (
            <div key={name} className="variable">
              <InlineLabel width="auto">{label}</InlineLabel>
              <span className="value">
                {asked.get(`var-${name}`)} <Icon name="angle-down" />
              </span>
            </div>
          ))}
      </div>
      <div className="grid" style={{ height: lowest * (CELL_HEIGHT + GAP) }}>
        {panels.map((panel) => {
          const { x, y, w, h } = panel.gridPos;
          const size = { width: w * column - GAP, height: h * (CELL_HEIGHT + GAP) - GAP };
          const style = { ...size, left: x * column, top: y * (CELL_HEIGHT + GAP) };
          return (
            <div key={panel.id ?? panel.title + y} className="cell" style={style}>
              {panel.type === 'row' ? (
                <div className="row">
                  <Icon name="angle-down" /> {panel.title}
                </div>
              ) : (
                <Panel panel={panel} dashboard={dashboard} onReady={onReady} {...size} />
              )}
            </div>
          );
        })}
      </div>
    </div>
  );
}

async function main() {
  await initPluginTranslations('page');
  const board = await (await fetch(`/boards/${asked.get('board')}.json`)).json();
  const from = dateTime(Number(asked.get('from')) * 1000);
  const to = dateTime(Number(asked.get('to')) * 1000);
  const range = { from, to, raw: { from, to } };
  const chosen = Object.fromEntries(board.templating.list.map(({ name }) => [name, asked.get(`var-${name}`) ?? '']));
  const variables = buildVariables(range, Number(asked.get('scrape') ?? 15), chosen);
  const url = asked.get('prometheus');
  const marks = [];
  for (const annotation of board.annotations?.list ?? []) {
    if (annotation.expr) {
      const times = await readMarks(url, annotation, range, variables);
      marks.push(...times.map((time) => ({ time, color: annotation.iconColor })));
    }
  }
  const dashboard = { url, range, variables, marks, zone: 'utc' };
  const panels = chooseRows(board.panels, asked.get('rows')?.split(','));
  const theme = createTheme({ colors: { mode: 'dark' } });
  const styles = document.createElement('style');
  styles.textContent = `
    body { background: ${theme.colors.background.canvas}; overflow: hidden; }
    .board { padding: 0 16px 8px; }
    header { display: flex; justify-content: space-between; align-items: center; padding: 8px 0; }
    header h1 { font-size: 18px; margin: 0; }
    .variables { display: flex; gap: 8px; padding: 0 0 12px; }
    .variable { display: flex; }
    .variable .value { border: 1px solid ${theme.components.input.borderColor}; background: ${theme.components.input.background};
      line-height: 30px; padding: 0 8px; border-radius: 2px; }
    .grid { position: relative; }
    .cell { position: absolute; }
    .row { display: flex; gap: 4px; align-items: center; font-size: 18px; line-height: 30px; color: ${theme.colors.text.primary}; }
    .no-data { display: flex; height: 100%; align-items: center; justify-content: center; color: ${theme.colors.text.secondary}; }`;
  document.head.append(styles);
  await Promise.all(['400 12px Inter', '500 12px Inter'].map((font) => document.fonts.load(font)));
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Board board={board} panels={panels} dashboard={dashboard} width={document.body.clientWidth - 32} />
      <PortalContainer />
    </ThemeContext.Provider>,
  );
}

main();
