// Python, in a worker, so that the page stays responsive. It answers messages {id, start} and {id, call} with {id,
// value} or {id, error}. python.js is the other end.
let call;

// The runtime's files come as blobs. A page opened from disk may fetch and import nothing but what it holds itself.
async function start({runtime, files}) {
  const url = name => URL.createObjectURL(runtime[name]);
  const {loadPyodide} = await import(url("pyodide.mjs"));
  const python = await loadPyodide({
    createPyodideModule: (await import(url("pyodide.asm.mjs"))).default,
    indexURL: url("pyodide.asm.wasm") + "#/",   // Pyodide appends the name, which is part of the fragment then
    stdLibURL: url("python_stdlib.zip"),
    lockFileContents: await runtime["pyodide-lock.json"].text(),
  });
  for (const [path, text] of Object.entries(files)) {
    python.FS.mkdirTree(path.replace(/[^/]*$/, "") || ".");
    python.FS.writeFile(path, text);
  }
  call = python.runPython(`
import importlib, json

from reference.errors import UserError

def call(module, name, arguments):
    try:
        value = getattr(importlib.import_module(module), name)(*json.loads(arguments))
        return json.dumps({"value": value}, allow_nan=False)
    except UserError as error:
        return json.dumps({"error": str(error)})

call`);
}

addEventListener("message", async ({data: {id, ...request}}) => {
  try {
    if (request.start) postMessage({id, value: await start(request.start)});
    else postMessage({id, ...JSON.parse(call(...request.call))});
  } catch (error) {
    postMessage({id, error: String(error), unexpected: true});
  }
});
