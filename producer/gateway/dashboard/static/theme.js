// Runs before the page is drawn, so that the page never appears in the wrong theme.
"use strict";
{
  const chosen = localStorage.getItem("promptq-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
