// Loads the page's scripts; where one of them does not come, the page says so.

import("./app.js").catch((error) => {
  const status = document.getElementById("status");
  status.dataset.kind = "down";
  status.textContent = `${error.message}; reload the page`;
});
