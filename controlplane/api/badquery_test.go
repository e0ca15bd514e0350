package api

import (
	"encoding/base64"
	"testing"
)

// TestBadQueries: every malformed parameter is a Status with upstream's
// reason and words (compared with k8s.io/apiserver 0.37).
func TestBadQueries(t *testing.T) {
	w := newWorld(t)
	w.want(201, "POST", cms, cmJSON("c", "v"))
	b64 := base64.RawURLEncoding.EncodeToString
	const (
		bad, invalid = "BadRequest", "Invalid"
		version      = `invalid resource version: resourceVersion: Invalid value: "abc": strconv.ParseUint: parsing "abc": invalid syntax`
		options      = `ListOptions.meta.k8s.io "" is invalid: `
	)
	for _, c := range []struct {
		method, target  string
		code            int
		reason, message string
	}{
		{"GET", cms + "?limit=abc", 400, bad, `strconv.ParseInt: parsing "abc": invalid syntax`},
		{"GET", cms + "?limit=99999999999999999999", 400, bad, `strconv.ParseInt: parsing "99999999999999999999": value out of range`},
		{"GET", cms + "?timeoutSeconds=abc", 400, bad, `strconv.ParseInt: parsing "abc": invalid syntax`},
		{"GET", cms + "?watch=1&timeoutSeconds=1s", 400, bad, `strconv.ParseInt: parsing "1s": invalid syntax`},
		{"GET", cms + "?timeout=abc", 400, bad, `invalid timeout specified in the request URL - time: invalid duration "abc"`},

		{"GET", cms + "?limit=1&continue=!!", 400, bad, "invalid continue token: continue key is not valid"},
		{"GET", cms + "?limit=1&continue=garbage", 400, bad, "invalid continue token: continue key is not valid"},
		{"GET", cms + "?limit=1&continue=" + b64([]byte(`{"v":7}`)), 400, bad, "invalid continue token: continue key is not valid"},
		{"GET", cms + "?limit=1&continue=" + b64([]byte(`{"v":"meta.k8s.io/v1","rv":1,"start":"x"}`)), 400, bad, "invalid continue token: continue key is not valid: server does not recognize this encoded version meta.k8s.io/v1"},
		{"GET", cms + "?limit=1&continue=" + b64([]byte(`{"v":"dunlin.dev/v1","rv":1}`)), 400, bad, "invalid continue token: continue key is not valid: encoded start key empty (version dunlin.dev/v1)"},
		{"GET", cms + "?limit=1&continue=" + b64([]byte(`{"v":"dunlin.dev/v1","n":"x"}`)), 400, bad, "invalid continue token: continue key is not valid: incorrect encoded start resourceVersion (version dunlin.dev/v1)"},
		{"GET", cms + "?resourceVersion=1&continue=" + b64([]byte(`{"v":"dunlin.dev/v1","rv":1,"n":"x"}`)), 400, bad, "specifying resource version is not allowed when using continue"},

		{"GET", cms + "?resourceVersion=abc", 400, bad, version},
		{"GET", cms + "?watch=1&resourceVersion=abc", 400, bad, version},
		{"GET", cms + "/c?resourceVersion=abc", 400, bad, version},
		{"DELETE", cms + "?resourceVersion=abc", 400, bad, version},
		{"GET", cms + "?resourceVersionMatch=Exact", 422, invalid, options + "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided"},
		{"GET", cms + "?resourceVersion=0&resourceVersionMatch=Exact", 422, invalid, options + `resourceVersionMatch: Forbidden: resourceVersionMatch "exact" is forbidden for resourceVersion "0"`},
		{"GET", cms + "?resourceVersion=1&resourceVersionMatch=Newest", 422, invalid, options + `resourceVersionMatch: Unsupported value: "Newest": supported values: "Exact", "NotOlderThan", ""`},
		{"GET", cms + "?watch=1&resourceVersion=1&resourceVersionMatch=NotOlderThan", 422, invalid, options + "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided"},
		{"GET", cms + "?watch=1&sendInitialEvents=true", 422, invalid, options + "resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"},
		{"GET", cms + "?sendInitialEvents=true", 422, invalid, options + "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for list"},

		{"DELETE", cms + "/c?gracePeriodSeconds=abc", 400, bad, `strconv.ParseInt: parsing "abc": invalid syntax`},
		{"DELETE", cms + "/c?propagationPolicy=Gently", 422, invalid, `DeleteOptions.meta.k8s.io "" is invalid: propagationPolicy: Unsupported value: "Gently": supported values: "Foreground", "Background", "Orphan", "nil"`},
		{"DELETE", cms + "/c?dryRun=Some", 422, invalid, `DeleteOptions.meta.k8s.io "" is invalid: dryRun: Unsupported value: ["Some"]: supported values: "All"`},

		{"GET", cms + "?labelSelector=a+in", 400, bad, "unable to parse requirement: found '' expected: '('"},
		{"GET", cms + "?labelSelector=a%3D%3D%3Db", 400, bad, "unable to parse requirement: found '=', expected: identifier"},
		{"DELETE", cms + "?labelSelector=-%3Db", 400, bad, "unable to parse requirement: <nil>: Invalid value: \"-\": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"},
		{"GET", pods + "?fieldSelector=a", 400, bad, "invalid selector: 'a'; can't understand 'a'"},
		{"GET", pods + "?fieldSelector=spec.foo%3Dx", 400, bad, "field label not supported: spec.foo"},
		{"GET", cms + "?fieldSelector=spec.foo%3Dx", 400, bad, `"spec.foo" is not a known field selector: only "metadata.name", "metadata.namespace"`},
		{"GET", cms + "/c?watch=1&fieldSelector=metadata.name%3Dd", 400, bad, "fieldSelector metadata.name doesn't match requested name"},
	} {
		r := w.do(c.method, c.target, "")
		m := r.json(t)
		if r.code != c.code || at(m, "kind") != "Status" || at(m, "reason") != c.reason || at(m, "message") != c.message {
			t.Errorf("%s %s:\n HTTP %d %v: %v\nwant %d %s: %s", c.method, c.target, r.code, at(m, "reason"), at(m, "message"), c.code, c.reason, c.message)
		}
	}
	// What upstream lets pass.
	w.want(200, "GET", cms+"?limit=-1", "")
	w.want(200, "GET", cms+"?timeout=0s", "")
}
