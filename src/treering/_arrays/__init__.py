"""Array bytes on their way to and from devices."""
