// Opens the story of what was clicked on; a group is opened in place.
export default (args, _, data) => {
  const source = data.source;
  const [at] = source.selected.indices;
  if (at === undefined) return;
  const {link, kind} = source.data;
  source.selected.indices = [];
  if (kind !== undefined && kind[at] === "group") {
    if (args.group.value === "tenant") args.tenant.value = link[at];
    else if (args.group.value === "name") args.name.value = "^" + link[at];
    args.group.value = "none";
  } else if (link[at]) {
    window.open("tensorcast-story?ref=" + encodeURIComponent(link[at]), "_blank", "noopener");
  }
};
