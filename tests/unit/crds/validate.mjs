// Reads a JSON list of custom resources from standard input, and prints what their schemas refuse; the exit status is how many.
import { readFileSync } from "node:fs";

const packages = { "keda.sh": "@kubernetes-models/keda", "monitoring.coreos.com": "@kubernetes-models/prometheus-operator" };
let refused = 0;
for (const resource of JSON.parse(readFileSync(0))) {
  const [group] = resource.apiVersion.split("/");
  const module = await import(`${packages[group]}/${resource.apiVersion}/${resource.kind}`);
  try {
    new module[resource.kind](resource).validate();
  } catch (error) {
    console.log(`${resource.kind} ${resource.metadata.name}: ${error.message}`);
    refused++;
  }
}
process.exit(refused);
