// Browsers refuse workers in pages that are opened as files. There, the search of the site runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      // What the script in the frame posts arrives here, as from a worker.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        this.deliver = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
        this.waiting.forEach(this.deliver);
      };
      inside.document.head.append(script);
    }

    postMessage(data) {
      if (this.deliver) this.deliver(data);
      else this.waiting.push(data);
    }
  };
  window.Worker = window.IFrameWorker;
}
