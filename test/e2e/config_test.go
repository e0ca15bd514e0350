//go:build e2e

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

const configured = `apiVersion: v1
kind: ConfigMap
metadata: {name: pair}
data: {a: "%[1]s", b: "%[1]s"}
---
apiVersion: v1
kind: Secret
metadata: {name: word}
stringData: {w: "%[1]s"}
`

const reader = `apiVersion: v1
kind: Pod
metadata: {name: reader, labels: {app: reader}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: busybox:test
    imagePullPolicy: Never
    # The two files of the newest folder are never of different versions; it is
    # looked at again whether it was the newest all the time.
    command: [sh, -c, "while :; do d=$(readlink /pair/..data); a=$(cat /pair/$d/a); b=$(cat /pair/$d/b); [ $d != $(readlink /pair/..data) ] || [ $a = $b ] || echo torn $a $b; done 2>/dev/null"]
    volumeMounts:
    - {name: pair, mountPath: /pair}
    - {name: word, mountPath: /word}
    - {name: pair, mountPath: /one, subPath: a}
  volumes:
  - {name: pair, configMap: {name: pair}}
  - {name: word, secret: {secretName: word}}
`

// TestConfigReachesRunningContainers: new contents of a ConfigMap and of a
// Secret appear in a running container's files, all of one at once; what is
// mounted by subPath stays, as upstream.
func TestConfigReachesRunningContainers(t *testing.T) {
	cluster.NeedContainers(t)
	c := cluster.New(t)
	c.ImportBusybox("busybox:test", nil)
	c.Apply(fmt.Sprintf(configured, "first"))
	c.Apply(reader)
	c.WaitReady("app=reader", 1)
	files := func() string { return c.Run("exec", "reader", "--", "cat", "/pair/a", "/pair/b", "/word/w", "/one") }
	if got := files(); got != strings.Repeat("first", 4) {
		t.Fatalf("%q", got)
	}
	for _, word := range []string{"second", "third"} {
		c.Apply(fmt.Sprintf(configured, word))
		c.Eventually(2*time.Minute, "the files are of the "+word+" version", func() error {
			if got := files(); got != word+word+word+"first" {
				return fmt.Errorf("%q", got)
			}
			return nil
		})
	}
	if out := c.Run("logs", "reader"); out != "" {
		t.Errorf("files of different versions were seen: %q", out)
	}
	if p := c.Pods("app=reader"); len(p) != 1 || p[0].Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("the pod was restarted: %+v", p)
	}
}
