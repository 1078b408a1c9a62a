// Where the page gets its data: from the process that serves it, or from precomputed files. Both give the same values.

/** An error whose message is meant for the reader of the page. */
export class ReadableError extends Error {}

async function fetchJson(address, options = {}) {
  let response;
  try {
    response = await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ReadableError("The explorer does not answer: start `inlinevit explore` again, and reload this page.");
  }
  let content = null;
  try {
    content = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
  }
  if (!response.ok || content === null) {
    const reason = content?.error ?? `the server answered ${response.status}`;
    throw new ReadableError(sentence(reason));
  }
  return content;
}

function sentence(text) {
  // A name of a file stays as it is.
  const begun = /^(another|the|there|this) /.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** Replace the packed weights of each column by one Float32Array per head; NaN is outside of the query's window. */
function unpack(answer) {
  for (const column of answer.columns) {
    if (Array.isArray(column.weights)) continue;
    const bytes = bytesOf(column.weights);
    const heads = [];
    if (column.scales) {
      const steps = new Int8Array(bytes.buffer);
      const length = steps.length / column.heads;
      for (let head = 0; head < column.heads; head++) {
        const scale = column.scales[head] / 127;
        heads.push(Float32Array.from(steps.subarray(head * length, (head + 1) * length), (step) =>
          step === -128 ? NaN : step * scale));
      }
    } else {
      const view = new DataView(bytes.buffer);
      const length = bytes.length / 4 / column.heads;
      for (let head = 0; head < column.heads; head++) {
        heads.push(Float32Array.from({ length }, (_, i) => view.getFloat32(4 * (head * length + i), true)));
      }
    }
    column.weights = heads;
  }
  return answer;
}

class LiveSource {
  constructor(state) {
    this.state = state;
    this.canUpload = true;
  }

  sampleAddress(index) {
    return `api/sample/${index}.png`;
  }

  openSample(index) {
    return fetchJson(`api/sample/${index}`, { method: "POST", headers: { "x-inlinevit": "1" } });
  }

  async openFile(file) {
    const { bytes } = this.state.limits;
    if (file.size > bytes) {
      const size = Math.round(bytes / 2 ** 20);
      throw new ReadableError(`${file.name} is larger than ${size} MB: choose a smaller picture.`);
    }
    return fetchJson("api/picture", {
      method: "POST",
      headers: { "x-inlinevit": "1", "x-file-name": encodeURIComponent(file.name.slice(0, 200)) },
      body: file,
    });
  }

  async rows(picture, model, layer, query, ownOnly, signal) {
    const own = ownOnly ? "&own=1" : "";
    const address = `api/rows?image=${picture.image}&model=${model}&layer=${layer}&row=${query[0]}&column=${query[1]}${own}`;
    return unpack(await fetchJson(address, { signal }));
  }

  locality(picture, model, signal) {
    return fetchJson(`api/locality?image=${picture.image}&model=${model}`, { signal });
  }

  hidden(picture, model, side, signal) {
    return fetchJson(`api/hidden?image=${picture.image}&model=${model}&side=${side}`, { signal });
  }
}

class StaticSource {
  constructor(state) {
    this.state = state;
    this.canUpload = false;
    this.files = new Map();
  }

  sampleAddress(index) {
    return `data/${index}/sample.png`;
  }

  async openSample(index) {
    return { ...this.state.images[index], image: index };
  }

  async rows(picture, model, layer, query, ownOnly, signal) {
    const address = `data/${picture.image}/${model}-${layer}.json`;
    if (!this.files.has(address)) this.files.set(address, await fetchJson(address, { signal }));
    const distance = (one) => (one.query[0] - query[0]) ** 2 + (one.query[1] - query[1]) ** 2;
    const nearest = this.files.get(address).reduce((a, b) => (distance(b) < distance(a) ? b : a));
    const { columns } = unpack(nearest);
    return { ...nearest, columns: ownOnly ? columns.filter((column) => column.own) : columns };
  }

  async locality(picture, model) {
    return picture.models[model].locality;
  }

  async hidden(picture, model, side) {
    return picture.models[model].hidden[side];
  }
}

export async function openSource() {
  const state = await fetchJson("state.json");
  return state.mode === "static" ? new StaticSource(state) : new LiveSource(state);
}
