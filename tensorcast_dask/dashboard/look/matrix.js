// Fits the matrix of bandwidths and the bars of its sources to the nodes that there are.
export default (args, counts) => {
  const set = (model, values) => model.setv(values, {sync: false});
  const {nodes, sources, flows} = counts.data;
  const count = Math.max(1, nodes[0]);
  const cell = Math.max(26, Math.min(64, Math.floor(620 / count)));
  const given = Math.max(1, sources[0]);
  const longest = Math.max(1, ...args.axis.data.name.map((one) => one.length));
  const room = 16 + longest * 7;
  const leans = longest * 7 > cell - 6;
  const heads = leans ? 16 + longest * 4.5 : 26;
  const tail = leans ? longest * 6 : 0;
  set(args.matrix, {
    visible: nodes[0] > 0, frame_width: room + count * cell + tail, frame_height: heads + count * cell,
  });
  set(args.matrix.x_range, {start: -0.5 - room / cell, end: count - 0.5 + tail / cell});
  set(args.matrix.y_range, {start: count - 0.5, end: -0.5 - heads / cell});
  set(args.column, {
    angle: {value: leans ? 0.6 : 0}, text_align: {value: leans ? "left" : "center"},
  });
  set(args.bars, {visible: sources[0] > 0, frame_height: given * 26});
  set(args.bars.y_range, {start: given - 0.5, end: -0.5});
  for (const one of args.also) set(one, {visible: nodes[0] > 0});
  set(args.table, {visible: flows[0] > 0});
};
