// Fits a figure to so many rows of one height; `right`, where it is given, names the column of the
// source that says how far its axis goes, with room for names before it and for text behind it.
export default (args, counts) => {
  const set = (model, values) => model.setv(values, {sync: false});
  const count = counts.data[args.count][0];
  const {figure} = args;
  set(figure, {visible: count > 0, frame_height: Math.max(1, count) * args.row});
  set(figure.y_range, {start: Math.max(1, count) - 0.5, end: -0.5});
  for (const one of args.also) set(one, {visible: count > 0});
  let span = 1;
  if (args.source !== null) {
    span = Math.max(0.001, ...args.source.data[args.right]);
  }
  set(figure.x_range, {start: -args.before_it * span, end: (1 + args.behind_it) * span});
  for (const one of [...figure.above, ...figure.center]) {
    if (one.bounds !== undefined) set(one, {bounds: [0, span]});
  }
  if (args.before !== null) {
    const {page, pages} = counts.data;
    set(args.before, {visible: pages[0] > 1, disabled: page[0] === 0});
    set(args.after, {visible: pages[0] > 1, disabled: page[0] + 1 >= pages[0]});
  }
};
