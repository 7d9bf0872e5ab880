// What the search box sends to the search: a flag is all of its words, and nothing is an operator.
{
  const post = Worker.prototype.postMessage;
  const words = (text) => text.replace(/[~^*]/g, " ").split(/\s+/).map((word) => {
    const plain = word.replace(/^[-+:]+/, "");
    const parts = plain.split("-").filter(Boolean);  // the last one may be half typed
    return /^moe-/.test(plain) ? `${parts.map((one) => `+${one}`).join(" ")}*` : plain;
  }).join(" ");
  Worker.prototype.postMessage = function (message, ...rest) {
    const query = typeof message?.data === "string";
    return post.call(this, query ? { ...message, data: words(message.data) } : message, ...rest);
  };
}
