// Says once that what was sent with it is on the screen.
export default function ({ setTriggerValue }) {
  let frame = requestAnimationFrame(() => {
    frame = requestAnimationFrame(() => setTriggerValue("drawn", true));
  });
  return () => cancelAnimationFrame(frame);
}
