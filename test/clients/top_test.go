//go:build clients

package clients

import (
	"errors"
	"regexp"
	"strings"
	"time"
)

// top reads what nodes and pods use, as from a metrics-server.
func (k *kubectl) top(old bool) {
	k.t.Helper()
	k.in(strings.NewReplacer("web", "busy", "image: print.wasm", "image: hold.wasm\n        args: [\"20\"]").Replace(strings.Split(app, "---")[0]), "apply", "-f", "-")
	k.ok("rollout", "status", "deploy/busy", "--timeout", "60s")
	line := func(pattern, out string) {
		k.t.Helper()
		if !regexp.MustCompile(`(?m)^` + pattern + ` *$`).MatchString(out) {
			k.t.Errorf("no line %s in:\n%s", pattern, out)
		}
	}
	line(`e2e +[0-9]+m +[0-9]+% +[1-9][0-9]*Mi +[0-9]+%`, k.ok("top", "nodes"))
	pods := ""
	k.c.Eventually(time.Minute, "what the guests have filled is measured", func() error {
		pods = k.ok("top", "pods", "-l", "app=busy")
		if !regexp.MustCompile(`(?m)^busy-\S+ +[0-9]+m +2[0-9]Mi *$`).MatchString(pods) {
			return errors.New(pods)
		}
		return nil
	})
	if n := strings.Count(pods, "busy-"); n != 2 {
		k.t.Errorf("%d pods in:\n%s", n, pods)
	}
	line(`busy-\S+ +main +[0-9]+m +2[0-9]Mi`, k.ok("top", "pods", "--containers", "-l", "app=busy"))
	line(k.ns+` +busy-\S+ +[0-9]+m +2[0-9]Mi`, k.ok("top", "pods", "-A"))
	if !old {
		k.has(w("metrics.k8s.io/v1beta1", "NodeMetrics", "PodMetrics"), "api-resources", "--api-group=metrics.k8s.io")
		k.has(w(`"kind":"NodeMetrics"`, `"window":"`), "get", "--raw", "/apis/metrics.k8s.io/v1beta1/nodes/e2e")
	}
	k.ok("delete", "deploy", "busy")
}
