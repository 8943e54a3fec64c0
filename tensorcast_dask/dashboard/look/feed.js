// Puts what the scheduler sends, one text for all that changed, where it is shown; nothing of it
// is sent back.
export default (args, feed) => {
  const set = (model, values) => model.setv(values, {sync: false});
  const told = JSON.parse(feed.data.json[0]);
  for (const [name, columns] of Object.entries(told.columns)) {
    const source = args.sources[name];
    if (source === undefined) continue;
    const chosen = source.selected.indices.length > 0;
    set(source, {data: columns});
    if (chosen) source.selected.indices = []; // the scheduler is told: it may be another line now
  }
  for (const [name, text] of Object.entries(told.texts ?? {})) {
    const place = args.places[name];
    if (place !== undefined) set(place, {text, visible: text !== ""});
  }
  if (told.counts !== undefined) {
    const counts = Object.entries(told.counts).map(([name, count]) => [name, [count]]);
    set(args.counts, {data: Object.fromEntries(counts)});
  }
};
