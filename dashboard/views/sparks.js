// Two sparklines of the last five minutes: power and temperature, each with its last value.
const KINDS = [
  { name: "power", unit: "W", place: 1 },
  { name: "temperature", unit: "°C", place: 2 },
];
const SPAN_S = 300, WIDE = 100, TALL = 30, LEAST = 0.1; // a line spans at least this share of its value

export default {
  template: `
    <div class="sparks" v-if="points.length">
      <template v-for="line in lines">
        <span class="soft">{{ line.name }}</span>
        <svg viewBox="0 0 100 30" preserveAspectRatio="none" role="img" :aria-label="line.words">
          <title>{{ line.words }}</title>
          <polyline :points="line.path" />
        </svg>
        <span class="figure">{{ line.last }}</span>
      </template>
    </div>
  `,
  data: () => ({ points: [] }),
  computed: {
    lines() {
      return KINDS.flatMap((kind) => this.line(kind) ?? []);
    },
  },
  methods: {
    add(points) {
      const known = new Map([...this.points, ...points].map((point) => [point[0], point]));
      const end = Math.max(...known.keys());
      this.points = [...known.values()].filter(([t]) => t > end - SPAN_S).sort((a, b) => a[0] - b[0]);
    },
    clear() {
      this.points = [];
    },
    line({ name, unit, place }) {
      const found = this.points.filter((point) => point[place] !== null);
      if (!found.length) return null;
      const values = found.map((point) => point[place]), low = Math.min(...values), high = Math.max(...values);
      const range = Math.max(high - low, LEAST * Math.abs(high)) || 1, bottom = (high + low - range) / 2;
      const end = this.points[this.points.length - 1][0], last = `${+values[values.length - 1].toPrecision(3)} ${unit}`;
      const x = (t) => (1 - (end - t) / SPAN_S) * WIDE, y = (value) => TALL * (0.95 - (0.9 * (value - bottom)) / range);
      const path = found.map((point) => `${x(point[0]).toFixed(1)},${y(point[place]).toFixed(1)}`).join(" ");
      const words = `${name}: ${last}; in the last 5 minutes ${+low.toPrecision(3)} to ${+high.toPrecision(3)} ${unit}`;
      return { name, path, last, words };
    },
  },
};
