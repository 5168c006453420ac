// Queries a Prometheus as Grafana's data source does, and returns Grafana's data frames.
import { FieldType, toDataFrame } from '@grafana/data';

const POINTS = 400; // of a range query, as in a panel of this width

/** Return the values of Grafana's variables for a query, by name without `$`. */
export function buildVariables(range, scrape, chosen) {
  const seconds = (range.to.valueOf() - range.from.valueOf()) / 1000;
  const interval = Math.max(scrape, Math.ceil(seconds / POINTS));
  return {
    ...chosen,
    __interval: `${interval}s`,
    __range: `${Math.round(seconds)}s`,
    __rate_interval: `${Math.max(interval + scrape, 4 * scrape)}s`,
  };
}

/** Replace `$name` and `${name}` in a text. */
export function interpolate(text, variables) {
  return text.replace(/\$\{?(\w+)\}?/g, (all, name) => variables[name] ?? all);
}

/** Query one target of a panel and return its frames. */
export async function runTarget(url, target, range, variables) {
  const query = interpolate(target.expr, variables);
  const interval = parseInt(variables.__interval, 10);
  const to = range.to.valueOf() / 1000;
  const answer = target.range
    ? await read(url, 'query_range', {
        query,
        start: align(range.from.valueOf() / 1000, interval),
        end: to,
        step: interval,
      })
    : await read(url, 'query', { query, time: to });
  if (target.format === 'table') {
    return answer.result.length ? [buildTable(answer.result, target)] : [];
  }
  return answer.result.map((series) => buildSeries(series, target, interval));
}

/** Return the times at which an annotation's query has a value, as the starts of uninterrupted stretches. */
export async function readMarks(url, annotation, range, variables) {
  const query = interpolate(annotation.expr, variables);
  const interval = parseInt(variables.__interval, 10);
  const start = align(range.from.valueOf() / 1000, interval);
  const answer = await read(url, 'query_range', { query, start, end: range.to.valueOf() / 1000, step: interval });
  const times = answer.result.flatMap((series) => series.values.map(([time]) => time * 1000)).sort((a, b) => a - b);
  return times.filter((time, index) => index === 0 || time - times[index - 1] > interval * 1000);
}

async function read(url, call, parameters) {
  const response = await fetch(`${url}/api/v1/${call}?${new URLSearchParams(parameters)}`);
  const body = await response.json();
  if (body.status !== 'success') {
    throw new Error(`${parameters.query}: ${body.error}`);
  }
  return body.data;
}

const align = (time, step) => Math.floor(time / step) * step;

const parse = (text) => ({ '+Inf': Infinity, '-Inf': -Infinity })[text] ?? Number(text);

function buildSeries(series, target, interval) {
  const samples = series.values ?? [series.value];
  const labels = Object.fromEntries(Object.entries(series.metric).filter(([name]) => name !== '__name__'));
  const legend = target.legendFormat?.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '');
  return toDataFrame({
    refId: target.refId,
    fields: [
      {
        name: 'Time',
        type: FieldType.time,
        config: { interval: interval * 1000 },
        values: samples.map(([time]) => time * 1000),
      },
      {
        name: 'Value',
        type: FieldType.number,
        labels,
        config: legend ? { displayNameFromDS: legend } : {},
        values: samples.map(([, value]) => parse(value)),
      },
    ],
  });
}

function buildTable(result, target) {
  const names = [...new Set(result.flatMap(({ metric }) => Object.keys(metric)))].filter((name) => name !== '__name__');
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: result.map(({ value: [time] }) => time * 1000) },
      ...names.sort().map((name) => ({
        name,
        type: FieldType.string,
        values: result.map(({ metric }) => metric[name] ?? ''),
      })),
      {
        name: `Value #${target.refId}`,
        type: FieldType.number,
        values: result.map(({ value: [, value] }) => parse(value)),
      },
    ],
  });
}
