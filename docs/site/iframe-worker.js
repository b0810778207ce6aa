// The search runs in a worker, which browsers refuse to pages that are opened from a disk. There, it
// runs in a hidden frame instead. The theme would take such a polyfill from the network.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const page = frame.contentDocument;
      page.open(); // else some browsers replace the frame's first document later
      page.write("<!doctype html><body></body>");
      page.close();
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = page.createElement("script");
      script.src = new URL(url, location.href);
      this.ready = new Promise((resolve) => script.addEventListener("load", resolve));
      page.body.append(script);
    }

    postMessage(data) {
      const message = new MessageEvent("message", { data });
      this.ready.then(() => this.inside.dispatchEvent(message));
    }
  };
  window.Worker = window.IFrameWorker;
}
