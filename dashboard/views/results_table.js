// Quasar's table with headings and checkboxes that have keys, sort directions and names for keyboard and screen readers.
// A component, because slots given from Python are recreated at each update, which loses the keyboard focus.
export default {
  template: `
    <q-table>
      <template #header-cell="props">
        <q-th :props="props" :tabindex="props.col.sortable ? 0 : -1" :aria-sort="direction(props.col)"
          @keydown.enter="props.col.sortable && props.sort(props.col)">{{ props.col.label }}</q-th>
      </template>
      <template #header-selection="props">
        <q-checkbox v-model="props.selected" dense aria-label="select all shown" />
      </template>
      <template #body-selection="props">
        <q-checkbox v-model="props.selected" dense :aria-label="'select ' + props.key" />
      </template>
      <template v-for="name in told" #[name]="props">
        <q-td :props="props" :class="{ bad: String(props.value).startsWith('✕') }">{{ props.value }}</q-td>
      </template>
      <template #body-cell-model="props">
        <q-td :props="props">
          <a class="link" :href="props.row.record" :aria-label="'record of ' + props.key">{{ props.value }}</a>
        </q-td>
      </template>
    </q-table>
  `,
  data: () => ({ told: ["median_ms", "checked", "status"].map((name) => "body-cell-" + name) }),
  methods: {
    direction(column) {
      if (!column.__thClass.includes("sorted")) return "none";
      return column.__thClass.includes("sort-desc") ? "descending" : "ascending";
    },
  },
};
