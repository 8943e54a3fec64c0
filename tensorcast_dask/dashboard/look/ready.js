// Runs a script of a source when the page is there.
export default async (args) => {
  await args.code.execute(args.counts);
};
