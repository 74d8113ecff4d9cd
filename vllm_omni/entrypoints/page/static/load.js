// Loads the page's scripts, and shows an error if one of them cannot be loaded.

import("./app.js").catch((error) => {
  const status = document.getElementById("status");
  status.dataset.kind = "down";
  status.textContent = `${error.message}; reload the page`;
});
