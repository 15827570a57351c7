const button = document.getElementById("copy"), text = document.getElementById("markdown");
function select() {
  const range = document.createRange();
  range.selectNodeContents(text);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}
button.addEventListener("click", async () => {
  let done = false;
  try { await navigator.clipboard.writeText(text.textContent); done = true; }
  catch { select(); done = document.execCommand("copy"); }  // a page from a file, or an old browser
  if (!done) select();
  document.getElementById("copied").textContent = done ? "Copied." : "Selected: press Ctrl+C.";
});
