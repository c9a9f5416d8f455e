// The textbook's own Python in a page. It works from disk as well as served, and no request leaves the machine.
//
//   const python = await startPython(PAGE, (part, words) => ...);     // part: how much is loaded, from 0 to 1
//   const answer = await python.call("pipelines", "play", state);     // pipelines.play(state), JSON in and JSON out
//
// PAGE is what tools/playground.py writes into NAME.data.js: the sizes of the runtime's files (or, if it was built
// without them, the reason), and the sources of all modules that NAME.py imports. A call is rejected with a UserError,
// whose message is the textbook's sentence, or with another Error, which is a bug.
"use strict";

class UserError extends Error {}

const loadedScripts = {};       // name -> its bytes, compressed, in base64
const scriptOf = (name, text) => { loadedScripts[name] = text; };      // each runtime/NAME.js calls this

function loadScript(name) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `runtime/${name}.js`;
    script.onload = resolve;
    script.onerror = () => reject(new Error(`${script.src} cannot be loaded. Build the site again: ./run.sh docs`));
    document.head.append(script);
  });
}

const TYPES = {mjs: "text/javascript", wasm: "application/wasm"};

async function unpack(name) {
  const compressed = await fetch(`data:application/gzip;base64,${loadedScripts[name]}`);
  delete loadedScripts[name];
  const bytes = await new Response(compressed.body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  return new Blob([bytes], {type: TYPES[name.split(".").pop()] || ""});
}

async function startPython({runtime, files}, progress = () => {}) {
  if (typeof runtime === "string") throw new UserError(runtime);
  const total = Object.values(runtime).reduce((sum, bytes) => sum + bytes), blobs = {};
  let loaded = 0;
  await Promise.all(Object.entries(runtime).map(async ([name, bytes]) => {
    await loadScript(name);
    blobs[name] = await unpack(name);
    loaded += bytes;
    progress(0.7 * loaded / total, `Loading Python: ${(loaded / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB`);
  }));
  progress(0.7, "Starting Python");
  // From disk, Chromium starts a worker that is a module only from a data: address.
  const code = encodeURIComponent(await blobs["worker.mjs"].text()), waiting = new Map();
  const worker = new Worker(`data:text/javascript,${code}`, {type: "module"});
  let calls = 0;
  worker.addEventListener("message", ({data: {id, value, error, unexpected}}) => {
    const {resolve, reject} = waiting.get(id);
    waiting.delete(id);
    if (error === undefined) resolve(value);
    else reject(unexpected ? new Error(error) : new UserError(error));
  });
  const send = message => new Promise((resolve, reject) => {
    waiting.set(++calls, {resolve, reject});
    worker.postMessage({id: calls, ...message});
  });
  worker.addEventListener("error", event => waiting.forEach(({reject}) => reject(new Error(event.message))));
  await send({start: {runtime: blobs, files}});
  progress(1, "Python is ready");
  return {call: (module, name, ...values) => send({call: [module, name, JSON.stringify(values)]})};
}
