package broken

// names is in an overlay the names of its mutations.
var names []string
