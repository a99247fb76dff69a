// Charts over time that keep their points and are sent only new ones. Each heading has the highest of the last values.
// Dragging zooms all of them, a double click resets.
import { echarts } from "nicegui-echart";

// As NiceGUI does for its own charts: a key that begins with a colon holds JavaScript.
function evaluated(options) {
  for (const key of Object.keys(options)) {
    if (key.startsWith(":")) {
      options[key.slice(1)] = new Function(`return (${options[key]})`)();
      delete options[key];
    } else if (options[key] && typeof options[key] === "object") evaluated(options[key]);
  }
  return options;
}

export default {
  template: `
    <div class="wide">
      <section v-for="(panel, place) in panels" v-show="shown[place]" class="card" :aria-label="panel.title">
        <h2><span>{{ panel.title }}</span><span class="figure">{{ shown[place] }}</span></h2>
        <div class="chart" role="img" :ref="(element) => { places[place] = element; }"></div>
      </section>
    </div>
  `,
  props: { panels: Array },
  data: () => ({ shown: [] }),
  created() {
    this.places = [];
    this.charts = [];
    this.series = this.panels.map(() => ({}));
    this.lines = {};
  },
  mounted() {
    this.observer = new ResizeObserver(() => this.charts.forEach((chart) => chart.resize()));
    this.places.forEach((place) => this.observer.observe(place));
    this.charts = this.panels.map((panel, number) => this.begun(panel, this.places[number]));
    echarts.connect(this.charts);
    this.charts.forEach((_, number) => this.draw(number));
  },
  beforeUnmount() {
    this.observer.disconnect();
    this.charts.forEach((chart) => chart.dispose());
  },
  methods: {
    begun(panel, place) {
      const chart = echarts.init(place, null, { renderer: "svg" }), zoom = (start, end) => chart.dispatchAction({ type: "dataZoom", start, end });
      chart.setOption(evaluated(JSON.parse(JSON.stringify(panel.options))));
      chart.getZr().on("dblclick", () => zoom(0, 100));
      return chart;
    },
    // `points` has one object per panel: new points by the name of their line.
    extend({ points, lines, until, span, isNew }) {
      if (isNew) this.series = this.panels.map(() => ({}));
      if (lines) this.lines = evaluated(lines);
      points.forEach((found, number) => {
        const series = this.series[number];
        for (const [name, values] of Object.entries(found)) (series[name] ??= []).push(...values);
        for (const name in series) series[name] = series[name].filter(([t]) => t >= until - span);
        const last = Object.values(series).flatMap((values) => values.slice(-1)).map(([, value]) => value);
        this.shown[number] = last.length && `${+Math.max(...last).toPrecision(3)} ${this.panels[number].unit}`;
      });
      this.$nextTick(() => this.charts.forEach((_, number) => this.draw(number)));
    },
    draw(number) {
      const lines = Object.entries(this.series[number]).map(([name, data], place) => {
        const own = { id: name, name, type: "line", showSymbol: data.length < 2, data };
        return place ? own : { ...own, ...this.lines };
      });
      const many = lines.length > 1; // a single line has its name in the heading
      const room = { legend: { show: many }, grid: { top: many ? 56 : 28 }, toolbox: { itemSize: 0 } };
      this.charts[number].setOption({ ...room, series: lines }, { replaceMerge: ["series"] });
      this.charts[number].dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
    },
  },
};
