// Package api serves the Kubernetes-compatible HTTP API over the registry:
// request parsing, content negotiation, verbs, patches and server-side
// apply, watches, pagination, and the chain that every request passes:
// authenticate, authorize, limits, dispatch.
//
// Owner and goroutines: every request runs in net/http's goroutine and owns
// nothing beyond it. The Server itself holds only bounded caches (snapshots
// of paginated lists, encoded watch events, field managers) and no goroutine;
// Close ends all watches.
package api
