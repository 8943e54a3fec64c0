// Puts what the scheduler sends, one text for all that changed, where it is shown.
export default (args, feed) => {
  const told = JSON.parse(feed.data.json[0]);
  for (const [name, columns] of Object.entries(told.columns)) {
    const source = args.sources[name];
    if (source === undefined) continue;
    const chosen = source.selected.indices;
    source.data = columns;
    if (chosen.length > 0) source.selected.indices = [];
  }
  if (told.texts !== undefined) {
    for (const [name, text] of Object.entries(told.texts)) {
      const place = args.places[name];
      if (place === undefined) continue;
      place.text = text;
      place.visible = text !== "";
    }
  }
  if (told.counts !== undefined) {
    args.counts.data = Object.fromEntries(Object.entries(told.counts).map(([k, v]) => [k, [v]]));
  }
};
