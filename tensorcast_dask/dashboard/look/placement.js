// Fits the figure to so many rows and nodes: a row is always as high, a name always has its room.
export default (args, counts) => {
  const {rows, nodes, page, pages, node_page, node_pages} = counts.data;
  const {figure, names, row} = args;
  const column = Math.max(30, Math.min(84, Math.floor(900 / Math.max(1, nodes[0]))));
  // Short names of nodes stand upright over their columns, long ones lean.
  const longest = Math.max(0, ...args.sources.data.name.map((one) => one.length));
  const leans = longest * 7 > column - 6;
  const heads = leans ? Math.min(96, 34 + longest * 5) : 44;
  const tail = leans ? longest * 6 : 0;
  figure.setv({
    visible: rows[0] > 0,
    frame_width: names + Math.max(1, nodes[0]) * column + tail,
    frame_height: rows[0] * row + heads,
  });
  figure.x_range.setv({
    start: -0.5 - names / column, end: Math.max(1, nodes[0]) - 0.5 + tail / column,
  });
  figure.y_range.setv({start: rows[0] - 0.5, end: -0.5 - heads / row});
  args.left.forEach((one) => { one.left = {value: -0.5 - names / column}; });
  args.name.x = {value: -0.5 - (names - 6) / column};
  args.note.x = {value: -0.5 - 8 / column};
  args.wide.right = {value: Math.max(1, nodes[0]) - 0.5};
  args.label.setv({
    angle: {value: leans ? 0.6 : 0}, text_align: {value: leans ? "left" : "center"},
    x_offset: {value: leans ? 2 : 0}, y: {value: leans ? -1.25 : -1.4},
  });
  args.before.disabled = page[0] === 0;
  args.after.disabled = page[0] + 1 >= pages[0];
  args.nodes_before.visible = args.nodes_after.visible = node_pages[0] > 1;
  args.nodes_before.disabled = node_page[0] === 0;
  args.nodes_after.disabled = node_page[0] + 1 >= node_pages[0];
};
