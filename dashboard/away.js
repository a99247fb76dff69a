// While the server is away, what is shown is dimmed and says its age; NiceGUI reconnects or reloads by itself.
{
  let heard = Date.now();
  const age = (seconds) => (seconds < 120 ? `${seconds} s` : `${Math.floor(seconds / 60)} min`);
  setInterval(() => {
    const away = Boolean(window.socket && !window.socket.connected);
    if (!away) heard = Date.now();
    document.body.classList.toggle("away", away);
    const told = document.querySelector(".server-away");
    const words = `The server is away: what is shown is ${age(Math.round((Date.now() - heard) / 1000))} old. `;
    if (told) told.textContent = away ? `${words}This page reconnects by itself.` : "";
  }, 1000);
}
