// Fits the figure to so many rows and nodes: a row is always as high, a name always has its room.
export default (args, counts) => {
  const set = (model, values) => model.setv(values, {sync: false});
  const {rows, nodes, page, pages, node_page, node_pages} = counts.data;
  const {figure, names, row} = args;
  const across = Math.max(1, nodes[0]);
  const column = Math.max(30, Math.min(84, Math.floor(900 / across)));
  // Short names of nodes stand upright over their columns, long ones lean.
  const longest = Math.max(0, ...args.sources.data.name.map((one) => one.length));
  const leans = longest * 7 > column - 6;
  const heads = leans ? Math.min(96, 34 + longest * 5) : 44;
  const tail = leans ? longest * 6 : 0;
  set(figure, {
    visible: rows[0] > 0,
    frame_width: names + across * column + tail,
    frame_height: rows[0] * row + heads,
  });
  set(figure.x_range, {start: -0.5 - names / column, end: across - 0.5 + tail / column});
  set(figure.y_range, {start: rows[0] - 0.5, end: -0.5 - heads / row});
  for (const one of args.left) set(one, {left: {value: -0.5 - names / column}});
  set(args.name, {x: {value: -0.5 - (names - 6) / column}});
  set(args.note, {x: {value: -0.5 - 8 / column}});
  set(args.wide, {right: {value: across - 0.5}});
  set(args.label, {
    angle: {value: leans ? 0.6 : 0}, text_align: {value: leans ? "left" : "center"},
    x_offset: {value: leans ? 2 : 0}, y: {value: leans ? -1.25 : -1.4},
  });
  set(args.before, {disabled: page[0] === 0});
  set(args.after, {disabled: page[0] + 1 >= pages[0]});
  set(args.nodes_before, {visible: node_pages[0] > 1, disabled: node_page[0] === 0});
  set(args.nodes_after, {
    visible: node_pages[0] > 1, disabled: node_page[0] + 1 >= node_pages[0],
  });
};
